"""FSDP version 1 as a strategy: `FullyShardedDataParallel` does the work."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.comm.control import Channel, in_step
from accel_core.errors import CheckpointError, ConfigurationError, EngineUnavailableError, PartView, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.modules.compilation import is_compiled_module
from accel_core.modules.ties import tied_tensor_groups
from accel_core.modules.unwrap import canonical_name
from accel_core.options.enums import DynamoBackend
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.process import rendezvous
from accel_core.strategies import recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Clip, Parts, PrecisionRequest
from accel_parallel.fsdp1 import flat
from accel_parallel.fsdp1.format import WrappedFormat
from accel_parallel.fsdp1.states import in_shards, inside
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding import gradients
from accel_parallel.sharding.guards import gather_outside_inference
from accel_parallel.sharding.loading import Empty, receive, views_of
from accel_parallel.sharding.methods import RefusingMethods
from accel_parallel.sharding.replaced import refuse_mixed
from accel_parallel.sharding.strategy import ShardedStrategy
from accel_parallel.sharding.whole import gather
from accel_parallel.sharding.wrapping import WrapPlan

__all__ = ["FullyShardedWrapperStrategy"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FullyShardedWrapperStrategy(ShardedStrategy):
    """Flattens the parameters of a block into one tensor, of which each rank holds a piece."""

    name = "fsdp1"
    containers = (FullyShardedDataParallel,)

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        if self._offloads and parts.accumulation.gradient_state.sync_each_batch:
            raise ConfigurationError(
                "FSDP1 loses earlier gradients if parameters are offloaded and every batch is synchronized; got "
                "cpu_offload and sync_each_batch=True. Set sync_each_batch=False, or use fsdp_version=2."
            )
        if self._offloads and (not self._splits or self.mesh.size(self.mesh.ndim - 1) == 1):
            raise ConfigurationError(
                "FSDP1 trains wrong weights where it offloads what it does not shard; got cpu_offload and "
                f"{self.plugin.sharding_strategy} on {self.world.size} processes. Use version 2, or no cpu_offload."
            )
        # A wrapper holds its model, so a strong reference to it would keep both alive forever.
        self._wrappers: MutableMapping[torch.nn.Module, ReferenceType[torch.nn.Module]] = WeakIdKeyDictionary()
        # Parameters that were flattened, and the model that they were part of.
        self._shapes: MutableMapping[torch.nn.Module, dict[str, torch.Size]] = WeakIdKeyDictionary()
        self._shards = (self.mesh.get_group(self.mesh.ndim - 1),)  # copies, if any, lie along the first axis
        self._ties: MutableMapping[torch.nn.Module, list[list[str]]] = WeakIdKeyDictionary()
        self.format = WrappedFormat(self.layout_of_states, self)
        self._flattened: MutableMapping[torch.Tensor, ReferenceType[torch.nn.Module]] = WeakIdKeyDictionary()

    @classmethod
    def lay_out(
        cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin
    ) -> Layout:
        """Shard over all ranks, over the ranks of a machine, or as the mesh axes say.

        Raises:
            ConfigurationError: The axes do not fit the sharding strategy.
            EngineUnavailableError: FSDP1 cannot be combined with one of the axes.
        """
        layout = super().lay_out(rank, world_size, parallelism, plugin)
        sized = parallelism is not None and parallelism.total_size > 1
        if sized and (layout.size("dp_replicate") > 1) != (plugin.sharding_strategy in _HYBRID):
            raise ConfigurationError(
                f"Only HYBRID_SHARD replicates shards; got {plugin.sharding_strategy} and "
                f"dp_replicate_size={layout.size('dp_replicate')}. Change one of them."
            )
        return layout

    @classmethod
    def _without_axes(cls, rank: int, world_size: int, plugin: FullyShardedDataParallelPlugin) -> Layout:
        if plugin.sharding_strategy not in _HYBRID:
            return super()._without_axes(rank, world_size, plugin)
        machine = max(1, rendezvous.locate().local_size)
        if world_size % machine:
            raise ConfigurationError(
                f"HYBRID_SHARD needs the same number of processes on every machine; got {world_size} processes, "
                f"{machine} of them here. Give the sizes: ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
            )
        return Layout.of(rank, world_size, {"dp_replicate": world_size // machine, "dp_shard": machine})

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the precision, with a scaler that checks the shards of all ranks for infinite gradients."""
        found = super().precision(asked)
        if found.scaler is not None:
            # torch's own would skip on one rank alone.
            found.scaler = ShardedGradScaler(self.world.device.type, **asked.scaler.to_kwargs())
        return found

    def check_optimizers(self, bundle: Bundle) -> None:
        """Also refuse optimizers that cannot follow flattened parameters."""
        self._refuse_optimizers(bundle)
        models = [self._bare(slot.given) for slot in bundle.models if not self.is_prepared(recipe.inside(slot.given))]
        new = {id(p) for model in models for p in model.parameters()}
        flat = set() if self.plugin.use_orig_params else new
        for slot in bundle.optimizers:
            held = [parameter for group in slot.given.param_groups for parameter in group["params"]]
            if self._flat_models(slot.given) or any(id(parameter) in flat for parameter in held):
                self._refuse_groups(slot.given)
            else:
                self._names.check(slot.given)
                if self.forms and any(id(parameter) in new for parameter in slot.given.state):
                    self._refuse_state(slot.given, "Create it from the prepared model's parameters.")

    @property
    def forms(self) -> tuple[str, ...]:
        """What parameters are once they are sharded: pieces, unless every rank holds all of them."""
        return ("flat",) if self._splits and self.mesh.size(self.mesh.ndim - 1) > 1 else ()

    def plan(self, model: torch.nn.Module) -> WrapPlan:
        """Also refuse a model whose parameters cannot be flattened block by block."""
        plan = super().plan(model)
        bare = self._bare(model)
        if self.is_prepared(recipe.inside(model)):
            self._refuse_other_wrapping(model)
            return plan
        compiles = self.parts.compilation.backend != DynamoBackend.NO or model is not bare
        if compiles and not self.plugin.use_orig_params:
            raise PreparationError(
                "Compiled models need their original parameters; got use_orig_params=False. Set "
                "use_orig_params=True, or use fsdp_version=2."
            )
        alone = {id(module._orig_mod) for module in bare.modules() if is_compiled_module(module)}
        found = next((name for name, block in plan.blocks if id(block) in alone), None)
        if found is not None:
            raise PreparationError(
                f"FSDP1 wraps blocks before they are compiled; got {found}, which was compiled by itself. Leave that "
                "to TorchDynamoPlugin(use_regional_compilation=True), compile the whole model, or use fsdp_version=2."
            )
        return plan

    def _refuse_mixed(self, block: str, own: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Refuse parameters that cannot be flattened together."""
        reason = "FSDP1 flattens the parameters of a block into one"
        refuse_mixed(reason, block, ((name, self._format_of(parameter)) for name, parameter in own))
        if not self.plugin.use_orig_params and len({p.requires_grad for _, p in own}) > 1:
            frozen = [name for name, p in own if not p.requires_grad]
            raise PreparationError(
                f"Without use_orig_params, a block of FSDP1 trains as a whole or not at all; got {', '.join(frozen)} "
                f"frozen in {block}. Set use_orig_params=True, or use fsdp_version=2."
            )

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the planned blocks, and the model."""
        wrapper = self._wrapper_of(model)
        return self._guarded(self._wrap(model, self.plans[model]) if wrapper is None else wrapper)

    def _wrap(self, model: torch.nn.Module, plan: WrapPlan) -> torch.nn.Module:
        if self.world.is_main:
            plan.log(model, self.plugin.mixed_precision_policy)
        self._shapes[model] = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._ties[model] = tied_tensor_groups(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        arguments = self._arguments(plan, model)
        with in_step(self.world, "prepare: FullyShardedDataParallel", views_of(model)):
            if arguments["sync_module_states"] and self.world.device.type == "cpu":
                # torch sends weights that lie on an accelerator only.
                arguments["auto_wrap_policy"] = self._wrap_as_they_arrive(model, plan)
                arguments["sync_module_states"] = False
            wrapper = FullyShardedDataParallel(model, **arguments)
        whole = plan.whole(model)
        for parameter in whole:
            parameter.data = parameter.data.to(self.world.device)
            if arguments["sync_module_states"]:
                dist.broadcast(parameter.data, 0)  # torch sends what it shards, and buffers
        if not self.plugin.use_orig_params:
            for parameter in trained:
                if all(parameter is not one for one in whole):
                    self._flattened[parameter] = ref(model)
        self._wrappers[model] = ref(wrapper)
        RefusingMethods(model, wrapper)
        gather_outside_inference(wrapper)
        self.averaging.watch(model, whole)
        self._names.remember(model)
        return wrapper

    def _wrap_as_they_arrive(self, model: torch.nn.Module, plan: WrapPlan) -> Callable[..., bool]:
        """Return a policy that fetches the values of a module from rank 0 just before torch may wrap it."""
        # So no rank needs room for more than a block whole; what no block has to itself comes at once.
        inside = {id(module) for _, block in plan.blocks for module in block.modules()}
        held = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        arrived = set[int]()

        def fetch(modules: list[torch.nn.Module]) -> None:
            arrived.update(map(id, modules))
            receive(modules, self.world.device)

        def shares(module: torch.nn.Module) -> bool:  # ties have to stay ties, so no block fetches them alone
            return any(p is not None and held[id(p)] > 1 for p in module._parameters.values())

        def is_block(module: torch.nn.Module) -> bool:
            if id(module) not in arrived:
                fetch([module])
            return id(module) in blocks

        blocks = {id(block) for _, block in plan.blocks}
        fetch([module for module in model.modules() if id(module) not in inside or shares(module)])
        return partial(lambda_auto_wrap_policy, lambda_fn=is_block)

    def _arguments(self, plan: WrapPlan, model: torch.nn.Module) -> dict[str, Any]:
        """Return the arguments of `FullyShardedDataParallel`."""
        plugin = self.plugin
        chosen = {id(block) for _, block in plan.blocks}
        from_main = self._starts_from_main(model)
        empty = Empty(self.world.device)
        given = getattr(plugin.param_init_fn, "__name__", "") != "_empty_on_device"  # the plugin's own knows no ties
        return {
            "device_mesh": self.mesh,
            "sharding_strategy": plugin.sharding_strategy,
            "cpu_offload": CPUOffload(offload_params=self._offloads),
            "auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen),
            "backward_prefetch": plugin.backward_prefetch,
            "mixed_precision": plugin.mixed_precision_policy,
            "ignored_states": plan.whole(model),
            "param_init_fn": plugin.param_init_fn if plugin.param_init_fn is not None and given else empty,
            "device_id": self.world.device,
            "sync_module_states": bool(plugin.sync_module_states) or from_main,
            "forward_prefetch": bool(plugin.forward_prefetch),
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": bool(plugin.use_orig_params),
        }

    @property
    def _offloads(self) -> bool:
        """Whether parameters leave the device; where that is the CPU, they are there already."""
        offload = self.plugin.cpu_offload
        return isinstance(offload, CPUOffload) and offload.offload_params and self.world.device.type != "cpu"

    def _wrapper_of(self, model: torch.nn.Module) -> torch.nn.Module | None:
        kept = self._wrappers.get(model)
        return None if kept is None else kept()

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model, or a part of it, was wrapped before."""
        return any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or (
            self._wrapper_of(model) is not None
        )

    def adopt(self, model: torch.nn.Module) -> None:
        """Take over a model that was wrapped before `prepare`."""
        super().adopt(model)
        bare = self._bare(model)
        if self._wrapper_of(bare) is None and isinstance(model, FullyShardedDataParallel):
            self._wrappers[bare] = ref(model)  # the user's wrapper stands for ours
            RefusingMethods(bare, model)
            with (
                in_step(self.world, "prepare: FullyShardedDataParallel", {}),
                FullyShardedDataParallel.summon_full_params(model, writeback=False),
            ):
                self._shapes[bare] = {canonical_name(n): p.shape for n, p in bare.named_parameters()}

    def _refuse_other_wrapping(self, model: torch.nn.Module) -> None:
        """Refuse a model that was wrapped before `prepare` in a way that does not match the plugin.

        Raises:
            PreparationError: Only parts of it are wrapped, so the gradients of the rest would not be averaged, or
                the settings differ.
        """
        wrapper = recipe.inside(model)
        if self._wrapper_of(self._bare(model)) is not None:
            return
        if not isinstance(wrapper, FullyShardedDataParallel):
            raise PreparationError(
                f"A model has to be wrapped as a whole or not at all; got {type(wrapper).__name__}, parts of which "
                "are wrapped by FullyShardedDataParallel. Wrap the model too, or leave wrapping to prepare()."
            )
        shards = wrapper.process_group
        sizes = 1 if shards is None else shards.size(), self.mesh.size(self.mesh.ndim - 1)
        kinds = wrapper.sharding_strategy, self.plugin.sharding_strategy
        visible = wrapper._use_orig_params, bool(self.plugin.use_orig_params)
        for what, (own, asked) in {"shards": sizes, "strategy": kinds, "use_orig_params": visible}.items():
            if own != asked:
                raise PreparationError(
                    f"A model wrapped before prepare() has to match the plugin; got {what} {own} and not {asked}. "
                    "Change one of them, or leave wrapping to prepare()."
                )

    def _now(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters unchanged; refuse those that were flattened."""
        if not self.plugin.use_orig_params and any(p.grad is None and p in self._flattened for p in parameters):
            raise PreparationError(
                "Without use_orig_params, FSDP1 replaces a model's parameters by flat ones; got original parameters, "
                "which have no gradients. Pass the parameters of the prepared model."
            )
        return parameters

    def rebind(self, optimizers: Iterable[Any]) -> None:
        """Point optimizers to the present parameters of prepared models, including flattened ones."""
        for optimizer in optimizers:
            models = self._flat_models(optimizer)
            if not models:
                super().rebind([optimizer])
                continue
            self._refuse_groups(optimizer)
            parameters = optimizer.param_groups[0]["params"]
            others = [parameter for parameter in parameters if parameter not in self._flattened]
            flat = [p for model in models for p in model.parameters() if p.requires_grad]
            parameters[:] = [*others, *(p for p in flat if all(p is not other for other in others))]

    def _flat_models(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
        """Return the models whose original parameters, since flattened, an optimizer holds."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p in self._flattened]
        found = {id(model): model for p in held if (model := self._flattened[p]()) is not None}
        return list(found.values())

    def _refuse_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that cannot follow flattened parameters.

        Raises:
            PreparationError: It has several groups, has already stepped, or trains only a part of a model.
        """
        advice = "Create it from the prepared model's parameters, set use_orig_params=True, or use fsdp_version=2."
        kind = type(optimizer).__name__
        if len(optimizer.param_groups) > 1:
            raise PreparationError(
                "Without use_orig_params, FSDP1 flattens parameters of different groups into one; got "
                f"{len(optimizer.param_groups)} groups of {kind}. {advice}"
            )
        if optimizer.state:
            self._refuse_state(optimizer, advice)
        held = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        models = {id(m) for m in self._flat_models(optimizer)}
        left = [p for p, m in self._flattened.items() if id(m()) in models and id(p) not in held]
        if left:
            raise PreparationError(
                f"Without use_orig_params, FSDP1 trains a model as a whole; got {kind} that leaves out {len(left)} "
                f"parameters. {advice}"
            )

    def _refuse_state(self, optimizer: torch.optim.Optimizer, advice: str) -> None:
        raise PreparationError(
            "Optimizer state cannot be carried over to parameters that FSDP1 flattens; got "
            f"{type(optimizer).__name__} with the state of {len(optimizer.state)} parameters. {advice}"
        )

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes accumulate whole gradients on each rank."""
        return self._unsynchronized(model)

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing, as gradients are synchronized anyway.

        Raises:
            PreparationError: It is used inside `no_sync`: torch decides there in the forward pass.
        """
        if not self.averaging.is_held(self._bare(model)):
            return nullcontext()
        raise PreparationError(
            "FSDP1 cannot synchronize gradients of a forward pass that ran under no_sync; got trigger_sync_in_backward "
            "inside no_sync. Run that forward pass outside no_sync, or use fsdp_version=2."
        )

    @contextmanager
    def _unsynchronized(self, model: torch.nn.Module) -> Iterator[None]:
        bare = self._bare(model)
        wrapper: Any = self._wrapper_of(bare)
        with self.averaging.holding(bare, True), nullcontext() if wrapper is None else wrapper.no_sync():
            yield

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients, flattened or whole, down to a common norm; return the norm before, the same on all ranks."""
        shards = self._shards if self._splits else ()
        # Nothing stays whole as a rule: then all parameters are shared alike, and none has to be looked for.
        groups = self.groups_of if self.averaging else lambda _: shards
        return gradients.clip_norm(self._now(clip.parameters), clip.limit, clip.norm_type, groups)

    def groups_of(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Return the ranks that share a parameter's gradient: those of the shards, unless every rank holds it whole."""
        return self._shards if self._splits and not self.averaging.holds(parameter) else ()

    @property
    def _splits(self) -> bool:
        """Whether ranks hold pieces of flattened parameters."""
        return self.plugin.sharding_strategy is not ShardingStrategy.NO_SHARD

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Return the flattened pieces that this rank holds; see `Strategy.held`.

        Raises:
            EngineUnavailableError: Buffers are asked for, which torch stores with no optimizer.
        """
        if buffers:
            raise EngineUnavailableError(
                "FSDP1 stores averages with the state of the parameters; got buffers='average'. Use fsdp_version=2, or "
                "leave it out: the model then has its own buffers under the average."
            )
        wrapper = self.wrapper_of(model)
        if wrapper is not None and in_shards(wrapper):
            flat.reshard(wrapper)
        return super().held(model)

    def whole_state(self, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
        """Gather a model's state under its bare names; every rank calls it."""
        wrapper = self._wrapper_of(self._bare(model))
        if wrapper is None:
            return super().whole_state(model, keep=keep)
        names = {name: PartView("parameter") for name, _ in wrapper.named_parameters()}
        # torch gives it to rank 0 alone, or to all.
        wanted = Channel(self.world, "the state dict of a sharded model").exchange(keep)
        with (
            in_step(self.world, "the state dict of a sharded model", names),
            self._whole(wrapper, on_first=not any(wanted[1:])),
        ):
            state = {canonical_name(name): value for name, value in wrapper.state_dict().items()}
        found: dict[str, Any] = gather(state, keep=True) if keep else {}
        return found

    def load_whole_state(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Load a whole state, equal on all ranks; each keeps its shards."""
        wrapper = self._wrapper_of(self._bare(model))
        with self._whole(wrapper):
            (model if wrapper is None else wrapper).load_state_dict(state)

    @contextmanager
    def _whole(self, wrapper: torch.nn.Module | None, *, on_first: bool = False) -> Iterator[None]:
        """Make the states of an FSDP module, and of its optimizers, whole in the block."""
        if wrapper is None:
            yield
            return
        # On the CPU, torch crashes when it moves a full state dict to the CPU.
        moved = {"offload_to_cpu": self.world.device.type != "cpu", "rank0_only": on_first}
        configs = FullStateDictConfig(**moved), FullOptimStateDictConfig(**moved)
        with warnings.catch_warnings():
            # torch prefers functions that leave a full state on one rank, or on a device that cannot hold it.
            warnings.simplefilter("ignore")
            with FullyShardedDataParallel.state_dict_type(wrapper, StateDictType.FULL_STATE_DICT, *configs):
                yield

    def whole_optimizer(self, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
        """Gather the state of an optimizer in the form of torch's optimizers; every rank calls it."""
        wrapper, bare = self.wrapper_under(optimizer), inside(optimizer)
        if wrapper is None:
            return super().whole_optimizer(optimizer, keep)
        with in_step(self.world, "the state of a sharded optimizer", {}), self._whole(wrapper):
            named = FullyShardedDataParallel.optim_state_dict(wrapper, bare)
        places = {name: place for place, name in enumerate(self.order(wrapper, named))}
        groups = [
            {**group, "params": sorted(places[name] for name in group["params"])} for group in named["param_groups"]
        ]
        # Parameters that are pieces of one share its step count, which each would move for itself after loading.
        state = {places[name]: {k: _own(v) for k, v in own.items()} for name, own in named["state"].items()}
        found: dict[str, Any] = gather({"state": state, "param_groups": groups}, keep=keep)
        return found

    def wrapper_of(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return the FSDP module around a prepared model, if there is one."""
        return self._wrapper_of(self._bare(model))

    def held_state(self, wrapper: torch.nn.Module) -> dict[str, Any] | None:
        """Return a model's state as the runs of elements that this rank holds; every rank calls it."""
        if not self.plugin.use_orig_params:
            return None
        bare = self._bare(wrapper)
        return flat.held_state(
            wrapper,
            self._shapes[bare],
            {id(parameter) for parameter in self.averaging.of(bare)},
            Channel(self.world, "the state of a sharded model").exchange,
            self._holders,
            self.world.rank,
        )

    @property
    def _holders(self) -> list[int]:
        """The ranks that share parameters with this one, in the order of their shards."""
        rows: list[list[int]] = self.mesh.mesh.reshape(-1, self.mesh.size(self.mesh.ndim - 1)).tolist()
        return next(row for row in rows if self.world.rank in row)

    def ties_of(self, model: torch.nn.Module) -> list[list[str]]:
        """Return the groups of names that were one tensor before a model was flattened."""
        return self._ties.get(self._bare(model), [])

    def whole_shapes(self, wrapper: torch.nn.Module) -> dict[str, torch.Size]:
        """Return the unsharded shapes of a wrapped model's parameters, by name."""
        return self._shapes[self._bare(wrapper)]

    def load_whole_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole optimizer state, equal on all ranks; each keeps its shards."""
        wrapper, bare = self.wrapper_under(optimizer), inside(optimizer)
        if wrapper is None:
            optimizer.load_state_dict(state)
            return
        named = self.whole_named(wrapper, optimizer)
        own = [[n for n in self.order(wrapper, named) if n in group["params"]] for group in named["param_groups"]]
        given = [place for group in state["param_groups"] for place in group["params"]]
        names = dict(zip(given, (name for group in own for name in group), strict=True))
        whole = {
            "state": {names[place]: entries for place, entries in state["state"].items()},
            "param_groups": [{**g, "params": n} for g, n in zip(state["param_groups"], own, strict=True)],
        }
        with self._whole(wrapper):
            bare.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(wrapper, bare, whole))

    def whole_named(self, wrapper: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer by parameter names; every rank calls it."""
        with self._whole(wrapper):
            return FullyShardedDataParallel.optim_state_dict(wrapper, inside(optimizer))

    def order(self, wrapper: torch.nn.Module, named: dict[str, Any]) -> list[str]:
        """Return the names of an optimizer's parameters in its own order, or in the model's if they were flattened."""
        names = [name for group in named["param_groups"] for name in group["params"]]
        if self.plugin.use_orig_params:
            return names
        model = list(self._shapes[self._bare(wrapper)])
        return sorted(names, key=model.index)

    def wrapper_under(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the FSDP module that an optimizer trains, `None` for no wrapped model; refuse several."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        wrappers = [kept() for kept in self._wrappers.values()]
        found = [w for w in wrappers if w is not None and any(id(p) in held for p in w.parameters())]
        if len(found) > 1:
            raise CheckpointError(
                f"FSDP1 gathers the state of an optimizer through its model; got one that trains {len(found)} models. "
                "Use one optimizer for each model, or fsdp_version=2."
            )
        return found[0] if found else None

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Return the names and weights that `save_model` writes: to be gathered, or on the ranks that may write."""
        wrapper = self._wrapper_of(self._bare(model))
        if wrapper is not None and in_shards(wrapper):
            held = self.held_state(wrapper)
            if held is not None:
                return flat.spread_weights(held, self._holders, *self._shards)
        return list(self.whole_state(model, keep=self.world.is_local_main).items())


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
