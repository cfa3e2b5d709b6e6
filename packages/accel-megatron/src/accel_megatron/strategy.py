"""Megatron as a strategy: megatron-core builds its own model, optimizer and schedule to match the user's."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_core.errors import ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.options.enums import DistributedType
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.process.world import GroupNeeds
from accel_core.strategies.bundle import Bundle, Kind, Slot
from accel_core.strategies.parts import Clip, Kit, Parts, PrecisionRequest
from accel_core.strategies.strategy import Strategy
from accel_megatron import arguments, build, groups, loaders, models, optimizers
from accel_megatron.engine import MegatronEngine
from accel_megatron.format import EngineFormat
from accel_megatron.loaders import MegatronLMDummyDataLoader
from accel_megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin
from accel_megatron.row import ENGINE
from accel_megatron.run import MegatronRun, start
from accel_megatron.wrappers import MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper


class MegatronStrategy(Strategy):
    """Puts one model, its optimizer and its schedule into an engine of megatron-core, which takes a step when called.

    megatron-core builds the model from the configuration of the one that was passed, with random weights.
    """

    name = "megatron"
    plugin_type = MegatronLMPlugin
    divides_loss = False  # megatron-core divides by micro batches or tokens itself
    format = EngineFormat()

    def __init__(self, parts: Parts) -> None:
        _refuse_window(parts)  # first: a refusal must not leave a run behind
        super().__init__(parts)
        self.plugin: MegatronLMPlugin = parts.plugin
        self.plugin.set_mixed_precision(self.number_format.name)
        self._run = MegatronRun(self.plugin, self.world, self.layout, Namespace())
        start(self._run)
        self._engine: MegatronEngine | None = None

    @classmethod
    def lay_out(
        cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: MegatronLMPlugin
    ) -> Layout:
        """Distribute the data over the groups of ranks that share a model, according to the plugin's degrees.

        Raises:
            ConfigurationError: The degrees do not divide the number of processes, or megatron-core lacks a
                requested option.
            EngineUnavailableError: A mesh was passed besides the degrees.
            MissingDependencyError: megatron-core is not installed.
        """
        ENGINE.require()
        arguments.refuse_unhonored(plugin)
        if parallelism is not None and parallelism.total_size > 1:
            raise EngineUnavailableError(
                f"Megatron has its own parallel degrees; got parallelism_config with {parallelism.active_mesh_dims}. "
                "Leave it out, and set tp_degree, pp_degree and context_parallel_size of MegatronLMPlugin."
            )
        return groups.lay_out(rank, world_size, arguments.degrees_of(plugin, world_size))

    @classmethod
    def group_needs(cls, plugin: MegatronLMPlugin) -> GroupNeeds:
        """Return that a single process needs a group too."""
        return GroupNeeds(alone=True)

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Leave casts of weights and scales of losses to megatron-core."""
        instead = "Use mixed_precision='bf16' and other_megatron_args={'fp8': 'hybrid'}."
        return asked.left_to("Megatron", self.world, instead)

    def label(self) -> DistributedType:
        """Return the label of Megatron."""
        return DistributedType.MEGATRON_LM

    @property
    def main_rank(self) -> int:
        """The last rank: it is in the last pipeline stage, where the losses are computed."""
        return self.world.size - 1

    def kind_of(self, given: object) -> Kind | None:
        """Recognize the stand-ins for a schedule and for loaders over megatron-core datasets."""
        if isinstance(given, MegatronLMDummyDataLoader):
            return "loaders"
        return "schedulers" if isinstance(given, MegatronLMDummyScheduler) else None

    def check(self, bundle: Bundle) -> None:
        """Refuse objects from which no engine can be built.

        Raises:
            ConfigurationError: The kind of model or optimizer is unknown, or the schedule is the user's own.
            EngineUnavailableError: megatron-core does not support what is asked for.
            PreparationError: There are several models, or an optimizer or schedule without its model.
        """
        new = [slot for slot in bundle.models if slot.given is not self._engine]
        optimizer = _new(bundle.optimizers, MegatronLMOptimizerWrapper)
        schedule = _new(bundle.schedulers, MegatronLMSchedulerWrapper)
        if len(new) + (self._engine is not None) > 1 or len(optimizer) > 1 or len(schedule) > 1:
            raise PreparationError(
                "A process trains one model with one optimizer and one schedule under Megatron; got "
                f"{len(new) + (self._engine is not None)} models, {len(optimizer)} optimizers and {len(schedule)} "
                "schedules. Prepare one of each."
            )
        if not new and (optimizer or schedule):
            raise PreparationError(
                "Megatron prepares a model together with its optimizer and its schedule; got them without it. Call "
                "`accelerator.prepare(model, optimizer, scheduler, loader)`."
            )
        for slot in schedule:
            optimizers.refuse_schedule(slot.given)
        trial = copy.copy(self.plugin)  # a refusal must leave the plugin unchanged
        trial.megatron_lm_default_args = dict(self.plugin.megatron_lm_default_args)
        for slot in bundle.loaders:
            self._check_loader(slot.given)
        if new:
            self._describe(trial, new[0].given, optimizer, schedule, bundle)
            found = arguments.build(trial, self.world.size)
            if trial.custom_model_provider_function is None and trial.custom_prepare_model_function is None:
                models.refuse_unbuilt(found)

    def _check_loader(self, loader: Any) -> None:
        if not isinstance(loader, MegatronLMDummyDataLoader) and not getattr(loader, "_is_accelerate_prepared", False):
            loaders.enlarge(loader, self.plugin.num_micro_batches or 1)

    def _describe(
        self,
        plugin: MegatronLMPlugin,
        model: torch.nn.Module,
        optimizer: list[Slot],
        schedule: list[Slot],
        bundle: Bundle,
    ) -> None:
        """Tell a plugin about the model, batch sizes, optimizer and schedule; values that the user set by name stay."""
        own = plugin.other_megatron_args or {}
        plugin.set_training_args(self._micro_batch(bundle), self.layout.replicas)
        if optimizer:
            optimizers.refuse_groups(optimizer[0].given)
            optimizers.refuse_kind(plugin, optimizer[0].given)
            plugin.set_optimizer_type(optimizer[0].given)
            plugin.megatron_lm_default_args |= optimizers.settings_of(optimizer[0].given)
        if schedule:
            plugin.set_scheduler_args(schedule[0].given)
        if plugin.custom_model_provider_function is None or hasattr(model, "config"):
            plugin.set_network_size_args(model)
        plugin.megatron_lm_default_args |= own  # last, because what the user set by name wins

    def _micro_batch(self, bundle: Bundle) -> int:
        """Return this rank's micro batch size: the smallest or largest of several loaders."""
        sizes = [size for slot in bundle.loaders if (size := loaders.batch_size_of(slot.given)) is not None]
        if not sizes:
            return int(self.plugin.megatron_lm_default_args.get("micro_batch_size", 1))
        size = min(sizes) if self.plugin.is_train_batch_min else max(sizes)
        # With split_batches, the loader's batch is that of all replicas.
        return size // self.layout.replicas if self.parts.data.split_batches else size

    def prepare(self, bundle: Bundle, kit: Kit) -> None:
        """Build the engine first, as datasets need its arguments, then loaders whose batches hold all micro batches."""
        new = [slot for slot in bundle.models if slot.given is not self._engine]
        optimizer = _new(bundle.optimizers, MegatronLMOptimizerWrapper)
        schedule = _new(bundle.schedulers, MegatronLMSchedulerWrapper)
        if new:
            self._describe(self.plugin, new[0].given, optimizer, schedule, bundle)
            self._run.optimizer = optimizer[0].given if optimizer else None
            self._run.schedule = schedule[0].given if schedule else None
            build.initialize(None)
            engine = MegatronEngine(None, *build.prepare_model_optimizer_scheduler(None))
            self._keep(engine, new[0], optimizer, schedule, kit)
        self._prepare_loaders(bundle.loaders, kit)  # after the engine, whose arguments datasets need
        for slot in bundle.models + bundle.optimizers + bundle.schedulers:  # what an earlier prepare returned
            if isinstance(slot.given, MegatronEngine | MegatronLMOptimizerWrapper | MegatronLMSchedulerWrapper):
                slot.result = slot.given

    def _keep(self, engine: MegatronEngine, model: Slot, optimizer: list[Slot], schedule: list[Slot], kit: Kit) -> None:
        self._engine = model.result = engine
        kit.keep_model(engine)
        self._own(engine)
        wrapper = None
        if optimizer:
            wrapper = engine.wrapper = MegatronLMOptimizerWrapper(engine.optimizer)
            optimizer[0].result = kit.prepare_optimizer(wrapper)
        if schedule:
            schedule[0].result = kit.prepare_scheduler(MegatronLMSchedulerWrapper(engine.scheduler, wrapper))

    def _prepare_loaders(self, slots: Sequence[Slot], kit: Kit) -> None:
        """Prepare loaders; a stand-in for datasets gives one iterator each time it was passed."""
        iterators: dict[int, list[Any]] = {}  # a stand-in is passed once for each of its three datasets
        for slot in slots:
            if isinstance(slot.given, MegatronLMDummyDataLoader):
                if id(slot.given) not in iterators:
                    made = slot.given.build_train_valid_test_data_iterators(None)
                    iterators[id(slot.given)] = list(made)
                    if self._engine is not None:
                        self._engine.datasets += [each for each in made if each is not None]
                left = iterators[id(slot.given)]
                slot.result = left.pop(0) if left else None
                continue
            prepared = getattr(slot.given, "_is_accelerate_prepared", False)
            given = slot.given if prepared else loaders.enlarge(slot.given, self.plugin.num_micro_batches or 1)
            slot.result = kit.prepare_loader(given, slot.place)

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool | None = None, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return an engine unchanged; refuse any other model, which needs `prepare` with its optimizer and loaders."""
        if isinstance(model, MegatronEngine):
            return model
        raise PreparationError(
            f"Megatron prepares a model together with its optimizer and its loaders; got a {type(model).__name__} "
            "alone. Call `accelerator.prepare(model, optimizer, scheduler, loader)`."
        )

    def rebind(self, optimizers: Iterable[Any]) -> None:
        """Do nothing: an engine's optimizer holds its own parts of the parameters."""

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Do nothing for the loss of the engine, whose call computed the gradients and took the step.

        Raises:
            PreparationError: It is another loss, which would have no effect.
        """
        own = None if self._engine is None else self._engine.loss
        # By identity: any other loss, even one computed from this one, comes too late for the step.
        if loss is not own or self.parts.accumulation.is_weighted:
            raise PreparationError(
                "Calling a Megatron model computes the gradients of its own loss and takes the step; got another "
                "loss. Pass what the model returned, or set custom_loss_function or custom_train_step_class of "
                "MegatronLMPlugin."
            )

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Return the gradient norm of the last step, which was clipped when the model was called.

        Raises:
            PreparationError: The norm is not the one by which the engine clips.
        """
        clips = float(self.plugin.megatron_lm_default_args.get("clip_grad") or 0.0)
        if clip.limit != clips or clip.norm_type != 2:
            raise PreparationError(
                "Megatron clips by the 2-norm inside the model call, before its step; got "
                f"clip_grad_norm_(max_norm={clip.limit}, norm_type={clip.norm_type}) and gradient_clipping={clips}. "
                "Set gradient_clipping of MegatronLMPlugin."
            )
        last = None if self._engine is None else self._engine.last
        return torch.tensor(0.0 if last is None else last.grad_norm or 0.0, device=self.world.device)

    def clip_grad_value_(self, clip: Clip) -> None:
        """Refuse: the step was taken when the model was called."""
        raise PreparationError(
            f"Megatron takes its step when the model is called; got clip_grad_value_({clip.limit}) after it. Set "
            "gradient_clipping of MegatronLMPlugin, which clips by the norm."
        )

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing: each call of the model accumulates and steps by itself."""
        return super().no_sync(model)

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Refuse: what trains is in an engine."""
        raise EngineUnavailableError(
            "Megatron-LM trains and saves the weights inside of its engine; got accelerator.ema. Train with tensor or "
            "pipeline parallel of ParallelismConfig, whose parts are averaged."
        )

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Refuse: no rank holds the whole model."""
        raise PreparationError(
            "Each Megatron rank holds only a part of the model; got a request for the whole state. Call "
            "accelerator.save_state, whose folder megatron.core.dist_checkpointing reads on any number of ranks."
        )

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Refuse: no rank holds the whole model."""
        return self.state_dict(model).items()


def _refuse_window(parts: Parts) -> None:
    steps = parts.accumulation.gradient_state.num_steps
    if steps != 1:
        raise ConfigurationError(
            f"Megatron accumulates gradients over micro batches; got gradient_accumulation_steps={steps}. Set "
            f"num_micro_batches={steps} of MegatronLMPlugin, and leave gradient_accumulation_steps at 1."
        )


def _new(slots: Sequence[Slot], prepared: type) -> list[Slot]:
    return [slot for slot in slots if not isinstance(slot.given, prepared | AcceleratedOptimizer)]
