"""FSDP version 1 as a strategy: `FullyShardedDataParallel` does the work.

What it refuses, beside what every sharded strategy does, and why:

| what | when | because |
|---|---|---|
| an axis for tensors or sequences; one of `dp_replicate` and HYBRID_SHARD without the other | layout | not combined |
| offloading with `sync_each_batch`, or of what is not sharded | start | torch would train wrong weights |
| a model wrapped in parts, or in another way than the plugin says | prepare | gradients would not be averaged |
| a block that was compiled by itself | prepare | torch wraps before it compiles |
| parameters of several dtypes in one block | prepare | they become one tensor |
| an optimizer that has stepped | prepare | its state cannot follow parameters that are flattened |
| one optimizer of several models | checkpoint | torch gathers its state through one model |
| `trigger_sync_in_backward` inside `no_sync` | step | torch decides in the forward pass |
| `ema(buffers="average")` | start | torch stores buffers with no optimizer |
| methods other than `forward` that compute (`sharding.methods`) | call | they would compute with pieces |

Original parameters stay visible, whatever the plugin's `use_orig_params` says: optimizers, frozen parameters and
compiled models need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from accel_core.checkpoint.model import StateOnlyModel
from accel_core.comm.control import Channel, in_step
from accel_core.errors import ConfigurationError, EngineUnavailableError, PartView, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.modules.compilation import is_compiled_module
from accel_core.modules.ties import tied_tensor_groups
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.process import rendezvous
from accel_core.strategies import recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_parallel.fsdp1 import states
from accel_parallel.fsdp1.format import WrappedFormat
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharded import ShardedStrategy
from accel_parallel.sharding.gather import gather
from accel_parallel.sharding.loading import Empty, receive, views_of
from accel_parallel.sharding.methods import RefusingMethods
from accel_parallel.sharding.param_attrs import refuse_mixed
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
        """Also refuse optimizers whose state cannot follow flattened parameters."""
        super().check_optimizers(bundle)
        models = [self._bare(slot.given) for slot in bundle.models if not self.is_prepared(recipe.inside(slot.given))]
        new = {id(p) for model in models for p in model.parameters()}
        for slot in bundle.optimizers if self.forms else ():
            if any(id(parameter) in new for parameter in slot.given.state):
                raise PreparationError(
                    "Optimizer state cannot be carried over to parameters that FSDP1 flattens; got "
                    f"{type(slot.given).__name__} with the state of {len(slot.given.state)} parameters. Create it from "
                    "the prepared model's parameters, or use fsdp_version=2."
                )

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

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the planned blocks, and the model."""
        wrapper = self._wrappers.of(model)
        return self._guarded(self._wrap(model, self.plans[model]) if wrapper is None else wrapper)

    def _wrap(self, model: torch.nn.Module, plan: WrapPlan) -> torch.nn.Module:
        if self.world.is_main:
            plan.log(model)
        ties = tied_tensor_groups(model)
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
        self._wrappers.add(model, wrapper, ties)
        RefusingMethods(model, wrapper)
        wrapper.check_is_root()  # makes what is gathered into, which no later pass could write to if inference did
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
        return {
            "device_mesh": self.mesh,
            "sharding_strategy": plugin.sharding_strategy,
            "cpu_offload": CPUOffload(offload_params=self._offloads),
            "auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen),
            "backward_prefetch": plugin.backward_prefetch,
            "mixed_precision": plugin.mixed_precision_policy,
            "ignored_states": plan.whole(model),
            "param_init_fn": plugin.param_init_fn or Empty(self.world.device),
            "device_id": self.world.device,
            "sync_module_states": bool(plugin.sync_module_states) or from_main,
            "forward_prefetch": bool(plugin.forward_prefetch),
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": True,
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
        visible = bool(wrapper._use_orig_params), True
        for what, (own, asked) in {"shards": sizes, "strategy": kinds, "use_orig_params": visible}.items():
            if own != asked:
                raise PreparationError(
                    f"A model wrapped before prepare() has to match the plugin; got {what} {own} and not {asked}. "
                    "Change one of them, or leave wrapping to prepare()."
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
        places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
        groups = [{**group, "params": [places[name] for name in group["params"]]} for group in groups]
        state = {places[name]: entries for name, entries in named["state"].items()}
        found: dict[str, Any] = gather({"state": state, "param_groups": groups}, keep=keep)
        return found

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Return the names and weights that `save_model` writes, on the ranks that may write; every rank calls it."""
        return self.whole_state(model, keep=self.world.is_local_main).items()
