"""FSDP version 1 as a strategy: `FullyShardedDataParallel` does the work.

What it refuses, beside what every sharded strategy does, and why:

| what | when | because |
|---|---|---|
| an axis for tensors or sequences; one of `dp_replicate` and HYBRID_SHARD without the other | layout | not combined |
| offloading with `sync_each_batch`, or of what is not sharded | start | torch would train wrong weights |
| a model wrapped in parts, or in another way than the plugin says | prepare | gradients would not be averaged |
| a block that was compiled by itself | prepare | torch wraps before it compiles |
| parameters of several dtypes in one block | prepare | they become one tensor |
| hidden parameters (`use_orig_params=False`): compilation, blocks frozen in part | prepare | they become one tensor |
| … an optimizer of several groups, of a part of the model, or that has stepped | prepare | it cannot follow them |
| … clipping of the parameters from before | step | they have no gradients |
| one optimizer of several models | checkpoint | torch gathers its state through one model |
| `trigger_sync_in_backward` inside `no_sync` | step | torch decides in the forward pass |
| `ema(buffers="average")` | start | torch stores buffers with no optimizer |
| methods other than `forward` that compute (`sharding.methods`) | call | they would compute with pieces |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.checkpoint.model import StateOnlyModel
from accel_core.comm.control import Channel, in_step
from accel_core.errors import ConfigurationError, EngineUnavailableError, PartView, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.modules.compilation import is_compiled_module
from accel_core.modules.ties import tied_tensor_groups
from accel_core.options.enums import DynamoBackend
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.process import rendezvous
from accel_core.strategies import recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_parallel.fsdp1 import states
from accel_parallel.fsdp1.format import WrappedFormat
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.gather import gather
from accel_parallel.sharding.loading import Empty, receive, views_of
from accel_parallel.sharding.methods import RefusingMethods
from accel_parallel.sharding.param_attrs import refuse_mixed
from accel_parallel.sharding.refusals import gather_outside_inference
from accel_parallel.sharding.strategy import ShardedStrategy
from accel_parallel.sharding.wrapping import WrapPlan

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
        self._shards = (self.mesh.get_group(self.mesh.ndim - 1),)  # copies, if any, lie along the first axis
        self._wrappers = states.Wrappers()
        self.format = WrappedFormat(self.layout_of_states, self.whole_optimizer, self._wrappers)
        # Parameters that were flattened, and the model that they were part of.
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
        self.refuse_optimizers(bundle)
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
        wrapper = self._wrappers.of(model)
        return self._guarded(self._wrap(model, self.plans[model]) if wrapper is None else wrapper)

    def _wrap(self, model: torch.nn.Module, plan: WrapPlan) -> torch.nn.Module:
        if self.world.is_main:
            plan.log(model, self.plugin.mixed_precision_policy)
        ties = tied_tensor_groups(model)
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
        self._wrappers.add(model, wrapper, ties)
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
        return self.plugin.offloads and self.world.device.type != "cpu"

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model, or a part of it, was wrapped before."""
        return any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or (
            self._wrappers.of(model) is not None
        )

    def adopt(self, model: torch.nn.Module) -> None:
        """Take over a model that was wrapped before `prepare`."""
        bare = self._bare(model)
        self._names.remember(bare)  # nothing is averaged of it: torch reduces the gradients
        if self._wrappers.of(bare) is None and isinstance(model, FullyShardedDataParallel):
            self._wrappers.add(bare, model, [])  # the user's wrapper stands for ours
            RefusingMethods(bare, model)

    def _refuse_other_wrapping(self, model: torch.nn.Module) -> None:
        """Refuse a model that was wrapped before `prepare` in a way that does not match the plugin.

        Raises:
            PreparationError: Only parts of it are wrapped, so the gradients of the rest would not be averaged, or
                the settings differ.
        """
        wrapper = recipe.inside(model)
        if self._wrappers.of(model) is not None:
            return
        if not isinstance(wrapper, FullyShardedDataParallel):
            raise PreparationError(
                f"A model has to be wrapped as a whole or not at all; got {type(wrapper).__name__}, parts of which "
                "are wrapped by FullyShardedDataParallel. Wrap the model too, or leave wrapping to prepare()."
            )
        shards = wrapper.process_group
        sizes = 1 if shards is None else shards.size(), self.mesh.size(self.mesh.ndim - 1)
        kinds = wrapper.sharding_strategy, self.plugin.sharding_strategy
        visible = states.keeps_parameters(wrapper), bool(self.plugin.use_orig_params)
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

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes accumulate whole gradients on each rank in the block."""
        bare = self._bare(model)
        wrapper: Any = self._wrappers.of(bare)
        with self.averaging.holding(bare, True), nullcontext() if wrapper is None else wrapper.no_sync():
            yield

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

    def groups_of(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Return the ranks that share a parameter's gradient: those of the shards, unless every rank holds it whole."""
        if self.averaging and self.averaging.holds(parameter):
            return ()
        return self._shards if self._splits else ()

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
        wrapper = self._wrappers.of(model)
        if wrapper is not None:
            states.reshard(wrapper)
        return super().held(model)

    def whole_state(self, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
        """Gather a model's state under its bare names; every rank calls it."""
        wrapper = self._wrappers.of(model)
        if wrapper is None:
            return super().whole_state(model, keep=keep)
        names = {name: PartView("parameter") for name, _ in wrapper.named_parameters()}
        # torch gives it to rank 0 alone, or to all.
        wanted = Channel(self.world, "the state dict of a sharded model").exchange(keep)
        with in_step(self.world, "the state dict of a sharded model", names):
            state = states.state_of(wrapper, whole=True, on_first=not any(wanted[1:]))
        tied = StateOnlyModel(state, self._wrappers.ties_of(model)).state
        found: dict[str, Any] = gather(tied, keep=True) if keep else {}
        return found

    def whole_optimizer(self, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
        """Gather the state of an optimizer in the form of torch's optimizers; every rank calls it."""
        wrapper = self._wrappers.under(optimizer)
        if wrapper is None:
            return super().whole_optimizer(optimizer, keep)
        with in_step(self.world, "the state of a sharded optimizer", {}):
            named = states.optimizer_of(wrapper, optimizer, whole=True)
            groups = named["param_groups"]
            if not states.keeps_parameters(wrapper):  # torch names them in the order in which they were flattened
                groups = states.in_order_of(states.state_of(wrapper), groups)
        places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
        groups = [{**group, "params": [places[name] for name in group["params"]]} for group in groups]
        state = {places[name]: states.with_own_counts(entries) for name, entries in named["state"].items()}
        found: dict[str, Any] = gather({"state": state, "param_groups": groups}, keep=keep)
        return found

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Return the names and weights that `save_model` writes, on the ranks that may write; every rank calls it."""
        return self.whole_state(model, keep=self.world.is_local_main).items()
