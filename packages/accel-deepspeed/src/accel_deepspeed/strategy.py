"""DeepSpeed as a strategy: engines own optimizer, number format and gradient exchange; accel ends the window."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, ref

import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.data.samplers import batch_size_of
from accel_core.errors import (
    EngineUnavailableError,
    PreparationError,
    StateError,
    UnsupportedTypeError,
)
from accel_core.mesh.layout import Layout
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.options.enums import DistributedType, DynamoBackend
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.process.world import GroupNeeds
from accel_core.strategies import placement, recipe
from accel_core.strategies.bundle import Bundle, Kind, Slot
from accel_core.strategies.parts import Clip, Kit, Parts, PrecisionRequest
from accel_core.strategies.quantized import refuse_packed
from accel_core.strategies.strategy import Strategy
from accel_deepspeed import configuration, library, whole
from accel_deepspeed.configuration import Members
from accel_deepspeed.engines import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper, Engine
from accel_deepspeed.format import EngineFormat
from accel_deepspeed.graph import engine_of
from accel_deepspeed.optimizers import for_the_host
from accel_deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_deepspeed.row import ENGINE
from accel_deepspeed.ulysses import SequenceParallel

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_L = TypeVar("_L")


class DeepSpeedStrategy(Strategy):
    """Puts each model that is trained into a DeepSpeed engine, together with its optimizer.

    The run's accumulation window decides when the engine synchronizes gradients, and losses are divided here by the
    length of the window, so that a short last window counts as in a single process. The update happens in
    `optimizer.step()`.
    """

    name = "deepspeed"
    plugin_type = DeepSpeedPlugin
    divides_loss = False  # `backward` here divides, by the length of the window

    def __init__(self, parts: Parts) -> None:
        self._sequences = SequenceParallel.of(parts)
        if self._sequences is not None:
            parts = replace(parts, mesh=self._sequences.mesh(parts.world.device.type))
        configuration.refuse_format(parts.plugins[0].hf_ds_config, parts.precision.name)
        super().__init__(parts)
        self.format = EngineFormat(self._engine_of, self.layout.size("tp") == 1)
        self._filling = configuration.Filling(parts)
        # Weak references: an engine is freed when the user drops its prepared optimizer.
        self._made: list[ReferenceType[Engine]] = []
        self._prepared: MutableMapping[torch.nn.Module, ReferenceType[Any]] = WeakIdKeyDictionary()

    @classmethod
    def lay_out(
        cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: DeepSpeedPlugin
    ) -> Layout:
        """Distribute the data over all ranks, or over the groups that share sequences or layers.

        Raises:
            ConfigurationError: The configuration contradicts itself.
            EngineUnavailableError: The mesh has other axes, along which DeepSpeed does not shard.
            MissingDependencyError: DeepSpeed is not installed.
        """
        ENGINE.require()
        configuration.refuse_contradictions(plugin.hf_ds_config)
        tensor_parallel = int(plugin.get_value("tensor_parallel.autotp_size", 0) or 1)
        if parallelism is not None and parallelism.total_size > 1:
            others = {"tp", "cp", "ep", "pp"}.intersection(parallelism.active_mesh_dims)
            if not parallelism.sp_enabled or others or tensor_parallel > 1:
                raise EngineUnavailableError(
                    "DeepSpeed can be combined with sequence parallelism, but with no other mesh axis; got "
                    f"{parallelism.active_mesh_dims} and tensor_parallel.autotp_size={tensor_parallel}. Leave "
                    "parallelism_config out (ZeRO shards over all processes), or set sp_size with it alone."
                )
            return Layout.of(rank, world_size, parallelism.sizes)
        return Layout.of(rank, world_size, {"dp_shard": world_size // tensor_parallel, "tp": tensor_parallel})

    @classmethod
    def group_needs(cls, plugin: object) -> GroupNeeds:
        """Return that a single process needs a group too."""
        return GroupNeeds(alone=True)

    @classmethod
    def decided_precision(cls, plugin: DeepSpeedPlugin) -> str | None:
        """Return the number format that DeepSpeed's configuration switches on."""
        return next(iter(configuration.formats_of(plugin.hf_ds_config)), None)

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Leave casts of weights and scales of losses to the engine."""
        return asked.left_to("DeepSpeed", self.world, "Use mixed_precision='bf16'.")

    def label(self) -> DistributedType:
        """Return the label of DeepSpeed."""
        return DistributedType.DEEPSPEED

    @property
    def reading(self) -> Layout:
        """Give each rank its own data, as whole sequences, until a loader is adapted to its model."""
        return self.layout if self._sequences is None else Layout.of(self.world.rank, self.world.size)

    def adapt_loader(self, loader: _L, model: torch.nn.Module) -> _L:
        """Make a loader return this rank's part of each sequence, in place; without sequence parallelism, do nothing.

        It returns as many batches as before, times the number of ranks that share a sequence.
        """
        if self._sequences is not None:
            self._sequences.adapt(loader, self.unwrap(model), fills=True)
        return loader

    @property
    def _engines(self) -> list[Engine]:
        """The engines that train, in the order of creation."""
        return [engine for made in self._made if (engine := made()) is not None]

    def _engine_of(self, model: object) -> Engine | None:
        """Return the engine of a prepared model, if it is trained."""
        return next((each for each in self._engines if each.deepspeed is model), None)

    @property
    def engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The last engine, for code that calls it directly."""
        engines = self._engines
        return DeepSpeedEngineWrapper(engines[-1].deepspeed) if engines else None

    def kind_of(self, given: object) -> Kind | None:
        """Recognize the stand-ins for the optimizer and the schedule of the configuration."""
        if isinstance(given, DummyOptim):
            return "optimizers"
        return "schedulers" if isinstance(given, DummyScheduler) else None

    def check(self, bundle: Bundle) -> None:
        """Refuse objects from which no engine can be built.

        Raises:
            ConfigurationError: The configuration contradicts itself or the run.
            PreparationError: An optimizer comes without its model, or is defined twice or not at all; or stage 3 would
                shard packed weights that do not compute in shards what the whole did.
        """
        plugin: DeepSpeedPlugin = self.parts.plugin
        config = plugin.hf_ds_config
        configuration.refuse_contradictions(config)
        for slot in bundle.models:
            placement.refuse_offloaded(slot.given)
            placement.refuse_misplaced(slot.given, self.world.device)
            if config.is_zero3():
                # After an evaluation on a CPU, bitsandbytes computes with bits that it arranged anew.
                cast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.parts.precision.name)
                refuse_packed(slot.given, self.world, self.world.device, cast=cast, integers=True)
        if self._sequences is not None:
            self._sequences.refuse(bundle, self.parts)
        for model, optimizer in self._pairs(bundle):
            schedule = _schedule_of(bundle, optimizer)
            scheduled = None if schedule is None else schedule.given
            if optimizer is None:
                configuration.refuse_stand_ins(config.config, None, scheduled)
                if config.is_zero3():
                    self._filling.plan(config, Members(model.given))
                continue
            configuration.refuse_stand_ins(config.config, optimizer.given, scheduled)
            for_the_host(optimizer.given, plugin, dry_run=True)  # refuses now what would fail in prepare
            self._filling.plan(config, self._members(model, optimizer, schedule, self._sizes(bundle)))

    def _pairs(self, bundle: Bundle) -> list[tuple[Slot, Slot | None]]:
        """Return the new models, each with its optimizer."""
        new = [slot for slot in bundle.models if not self._is_known(slot.given)]
        pairs: dict[int, Slot] = {}
        for optimizer in bundle.optimizers:
            if isinstance(optimizer.given, AcceleratedOptimizer):  # prepared before, with its engine
                continue
            held = {id(parameter) for parameter in _parameters_of(optimizer.given)}
            # New models it trains.
            owners = [slot for slot in new if any(id(p) in held for p in slot.given.parameters())]
            if len(owners) != 1 or id(owners[0]) in pairs:
                raise PreparationError(
                    "DeepSpeed prepares a model together with its optimizer, one for each; got "
                    f"{type(optimizer.given).__name__}, which trains {len(owners)} of {len(new)} new models. "
                    "Call `accelerator.prepare(model, optimizer)`."
                )
            pairs[id(owners[0])] = optimizer
        return [(slot, pairs.get(id(slot))) for slot in new]

    def _is_known(self, model: torch.nn.Module) -> bool:
        return _is_engine(self._known(model))

    def prepare(self, bundle: Bundle, kit: Kit) -> None:
        """Prepare loaders first, as the configuration needs their batch sizes, then engines."""
        sizes = self._sizes(bundle)
        for slot in bundle.loaders:
            slot.result = kit.prepare_loader(slot.given, slot.place)
            if self._sequences is not None and bundle.models:
                self._sequences.adapt(slot.result, self.unwrap(bundle.models[0].given), fills=False)
        pairs = self._pairs(bundle)
        for slot in bundle.models:
            if self._is_known(slot.given):
                slot.result = self._known(slot.given)
                kit.keep_model(slot.result)
        for slot in bundle.optimizers:
            if isinstance(slot.given, AcceleratedOptimizer):
                slot.result = kit.prepare_optimizer(slot.given)
        taken: list[Slot] = []
        for model, optimizer in pairs:
            schedule = _schedule_of(bundle, optimizer)
            taken += [] if schedule is None else [schedule]
            self._prepare_together(model, optimizer, schedule, sizes, kit)
        for slot in bundle.schedulers:
            if all(slot is not one for one in taken):
                slot.result = kit.prepare_scheduler(slot.given)

    def _prepare_together(
        self, model: Slot, optimizer: Slot | None, schedule: Slot | None, sizes: Sequence[int | None], kit: Kit
    ) -> None:
        if optimizer is None:
            model.result = kit.prepare_model(model.given, model.place)
            return
        given = None if schedule is None else schedule.given
        engine = self._initialize(self._members(model, optimizer, schedule, sizes))
        model.result = engine.deepspeed
        kit.keep_model(engine.deepspeed)
        wrapper = DeepSpeedOptimizerWrapper(engine.deepspeed.optimizer, engine, self.parts.accumulation.gradient_state)
        optimizer.result = kit.prepare_optimizer(wrapper)
        if schedule is None:
            return
        if engine.deepspeed.lr_scheduler is not None:
            own = DeepSpeedSchedulerWrapper(engine.deepspeed.lr_scheduler, [wrapper])
            schedule.result = kit.prepare_scheduler(own)
        else:
            schedule.result = kit.prepare_scheduler(given)
            schedule.result.optimizers = [wrapper]  # it steps when the engine does

    def _members(self, model: Slot, optimizer: Slot, schedule: Slot | None, sizes: Sequence[int | None]) -> Members:
        scheduled = None if schedule is None else schedule.given
        return Members(model.given, optimizer.given, scheduled, sizes, self.parts.plugin.is_train_batch_min)

    def _initialize(self, members: Members) -> Engine:
        """Create an engine."""
        model, optimizer, schedule = members.model, members.optimizer, members.schedule
        plugin: DeepSpeedPlugin = self.parts.plugin
        deepspeed = library.load(self.world.device, self.world.local_rank)
        config = self._filling.fill(plugin.hf_ds_config, members)
        plugin.deepspeed_config = plugin.hf_ds_config.config  # the Trainer may have put in its own
        self._follow_steps(config)
        trained = frozenset(id(each) for each in _parameters_of(optimizer) if each.requires_grad)
        arguments: dict[str, Any] = {"model": recipe.compile_blocks(model, self.parts.compilation), "config": config}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            arguments["optimizer"] = for_the_host(optimizer, plugin)
            _follow(schedule, arguments["optimizer"])
        else:
            config.pop("optimizer", None)  # DeepSpeed would build one, and states for it
            config.pop("scheduler", None)
        if isinstance(schedule, DummyScheduler):
            arguments["lr_scheduler"] = schedule.lr_scheduler_callable
        elif type(schedule).__module__.startswith("deepspeed."):
            arguments["lr_scheduler"] = schedule
        if plugin.hf_ds_config.is_zero3():
            plugin.set_moe_leaf_modules(model)  # before DeepSpeed puts its hooks in
        if self._sequences is not None:
            arguments["mpu"] = self._sequences.join(arguments["model"])
        with library.as_local_rank(self.world.device):
            made, *_ = deepspeed.initialize(**arguments)
        self._refuse_other_groups(made)
        self._compile(made)  # after DeepSpeed has put its hooks into the model
        engine = Engine(made, trained)
        self._prepared[model] = ref(made)
        self._own(made)
        if optimizer is not None:
            self._made.append(ref(engine))
        return engine

    def _refuse_other_groups(self, made: DeepSpeedEngine) -> None:
        """Refuse an engine that uses the sequence groups of an earlier run: DeepSpeed creates them once per process."""
        asked = 1 if self._sequences is None else self._sequences.size
        if made.sequence_parallel_size != asked:
            raise StateError(
                f"A process can create DeepSpeed's sequence groups only once; got sp_size={asked} after "
                f"{made.sequence_parallel_size}. Start a new process to change it."
            )

    def _follow_steps(self, config: dict[str, Any]) -> None:
        """Take the number of accumulation steps from the configuration if the script gives none."""
        state = self.parts.accumulation.gradient_state
        steps = config["gradient_accumulation_steps"]
        if state.num_steps != steps:
            state.plugin_kwargs["num_steps"] = steps

    def _compile(self, engine: DeepSpeedEngine) -> None:
        """Compile an engine if the run compiles whole models."""
        settings = self.parts.compilation
        if settings.backend != DynamoBackend.NO and not settings.use_regional_compilation:
            arguments = settings.to_kwargs()
            arguments.pop("use_regional_compilation", None)
            backend = arguments.pop("backend")
            engine.compile(backend=backend, compile_kwargs=arguments)

    def _sizes(self, bundle: Bundle) -> list[int | None]:
        """Return the batch size of each loader on this rank."""
        return [self._batch_of(slot.given) for slot in bundle.loaders]

    def _batch_of(self, loader: DataLoader[Any]) -> int | None:
        """Return the batch size of a loader on this rank; `None` for a loader without one."""
        size = batch_size_of(loader)
        if size is None:  # it comes from the configuration then
            return None
        return size // self.layout.replicas if self.parts.data.split_batches else size

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool | None = None, evaluation: bool = False
    ) -> torch.nn.Module:
        """Prepare a model that is only evaluated: stage 3 shards it, the other stages keep it whole on each rank."""
        if self._is_known(model):
            known: torch.nn.Module = self._known(model)
            return known
        if self.parts.plugin.hf_ds_config.is_zero3():
            made: torch.nn.Module = self._initialize(Members(model)).deepspeed
            return made
        if self.parts.device_placement if device_placement is None else device_placement:
            placement.move(model, self.world.device)
        if self._sequences is not None:
            library.load(self.world.device, self.world.local_rank)
            self._sequences.join(model)
        model = recipe.compile_whole(recipe.compile_blocks(model, self.parts.compilation), self.parts.compilation)
        self._own(model)
        return model

    def _known(self, model: torch.nn.Module) -> Any:
        made = self._prepared.get(model)
        engine = None if made is None else made()
        return model if engine is None else engine

    def rebind(self, optimizers: Iterable[Any]) -> None:
        """Do nothing: an engine's optimizer holds its own parts of the parameters."""

    def release(self) -> None:
        """End the engines that train, which their own hooks would keep alive."""
        for engine in self._engines:
            library.destroy(engine.deepspeed)
        self._made.clear()

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients in the engine that a loss comes from.

        Raises:
            StateError: The loss comes from no engine.
            UnsupportedTypeError: The loss is not a tensor, such as the `None` of a model that was given no labels.
        """
        accumulation = self.parts.accumulation
        divide = kwargs.pop("scale_wrt_gas", True) and not accumulation.is_weighted
        if not isinstance(loss, torch.Tensor):
            shared = self._sequences is not None
            cause = " Batches of shared sequences have shift_labels in place of labels." if shared else ""
            raise UnsupportedTypeError(
                f"A loss has to be a tensor; got {loss!r}.{cause} Compute it from the model's output and the labels."
            )
        engine = engine_of(loss, self._engines)
        divisor = accumulation.divisor if divide else 1
        if self._sequences is not None:
            divisor *= self._sequences.sums(engine.deepspeed)
        if divisor != 1:
            loss = loss / divisor
        ends = accumulation.gradient_state.sync_gradients and not engine.held
        engine.backward(loss, ends_window=ends, **kwargs)

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Refuse always: what trains is in an engine."""
        raise EngineUnavailableError(
            "DeepSpeed trains copies of the weights inside of its engine, in parts from stage 1 on, and saves them "
            "itself; got accelerator.ema. Train with FSDP2, whose shards are averaged."
        )

    def scale_gradients(self, factor: float, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> None:
        """Multiply the gradients of a window in all engines that it trained."""
        complete = [engine for engine in self._engines if engine.is_complete]
        if not [engine for engine in complete if engine.gradients.scale(factor)]:
            raise StateError(
                "The losses of this window have weights, but there are no gradients to apply them to; got "
                f"{len(self._engines)} engines. Prepare the model that the losses come from with its optimizer."
            )

    def whole_of(self, parameter: torch.Tensor, value: torch.Tensor | None) -> Any:
        """Return whole a parameter's value or its gradient, of which engines hold parts."""
        if value is not parameter:
            return importlib.import_module("deepspeed.utils").safe_get_full_grad(parameter)
        return whole.gathered(parameter) if hasattr(parameter, "ds_id") else parameter.detach()

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state on the first rank, and an empty dict on the others; every rank calls it.

        Raises:
            ConfigurationError: In stage 3, the configuration does not let weights be gathered.
        """
        engine = self._known(model)
        if whole.is_split(engine):
            joined = whole.joined(engine)
            return joined if self.world.is_main else {}
        if not whole.is_sharded(engine):
            state = super().state_dict(engine, unwrap=unwrap)
            return state if self.world.is_main else {}
        whole.refuse_ungathered(engine)
        return whole.state_of(engine, keep=self.world.is_main)

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Yield the weights that `save_model` writes; see `Strategy.weights`."""
        engine = self._known(model)
        if whole.is_split(engine):
            return whole.joined(engine).items()
        if not whole.is_sharded(engine):
            return super().weights(engine)
        whole.refuse_ungathered(engine)
        return whole.weights_of(engine)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes do not end the window of a model's engine."""
        return self._holding(model, True)

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass ends the window of a model's engine."""
        return self._holding(model, False)

    @contextmanager
    def _holding(self, model: torch.nn.Module, held: bool) -> Iterator[None]:
        engine = self._engine_of(model)
        if engine is None:
            yield
            return
        before, engine.held = engine.held, held
        try:
            yield
        finally:
            engine.held = before

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale the gradients of engines down to a common norm, and return the norm before, the same on all ranks."""
        ids = {id(parameter) for parameter in clip.parameters}
        engines = [engine for engine in self._engines if not ids.isdisjoint(engine.parameters)]
        if not engines:
            return super().clip_grad_norm_(clip)
        left_out = sum(len(engine.parameters - ids) for engine in engines)
        if left_out or clip.norm_type != 2:
            raise PreparationError(
                f"DeepSpeed clips by the 2-norm of all gradients of an engine; got norm_type={clip.norm_type} and "
                f"parameters without {left_out} of those it trains. Pass model.parameters()."
            )
        for engine in engines:
            if whole.is_split(engine.deepspeed) and not engine.deepspeed.zero_optimization():
                raise PreparationError(
                    "Clipping with tensor parallelism needs ZeRO stage 1 or higher; got stage 0 with "
                    f"tensor_parallel.autotp_size={engine.deepspeed.autotp_size()}. Set zero_optimization.stage to 1."
                )
        complete = [engine for engine in engines if engine.is_complete]
        if not complete:
            return torch.tensor(float(engines[0].deepspeed.get_global_grad_norm() or 0.0), device=self.world.device)
        total = math.hypot(*(engine.gradients.norm() for engine in complete))  # as one norm of all gradients
        # As torch does; a step with infinite ones is skipped.
        factor = min(1.0, float(clip.limit) / (total + 1e-6)) if math.isfinite(total) else 1.0
        for engine in complete:
            engine.clip(factor, total)
        return torch.tensor(total, device=self.world.device)

    def clip_grad_value_(self, clip: Clip) -> None:
        """Refuse: an engine's gradients are scaled together or not at all."""
        raise PreparationError(
            f"DeepSpeed does not clip single elements of gradients; got clip_grad_value_({clip.limit}). "
            "Use clip_grad_norm_."
        )


def _is_engine(model: object) -> bool:
    # By name, as importing DeepSpeed takes seconds.
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def _parameters_of(optimizer: torch.optim.Optimizer | DummyOptim | None) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    groups: list[Any] = list(optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups)
    if isinstance(optimizer, DummyOptim):
        optimizer.params = groups  # which may have been an iterator
    return [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]


def _schedule_of(bundle: Bundle, optimizer: Slot | None) -> Slot | None:
    """Return the schedule that moves an optimizer."""
    if optimizer is None:
        return None
    for slot in bundle.schedulers:
        if isinstance(slot.given, AcceleratedScheduler):  # prepared before
            continue
        if slot.given.optimizer is optimizer.given:
            return slot
    return None


def _follow(schedule: Any, optimizer: object) -> None:
    """Let a schedule of torch move the optimizer that takes the place of its own."""
    if schedule is not None and not isinstance(schedule, DummyScheduler):
        schedule.optimizer = optimizer  # or it would go on setting rates that no step reads
