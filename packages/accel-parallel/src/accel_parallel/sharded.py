"""What sharding in place and sharding by wrappers have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from accel_core.comm.control import in_step
from accel_core.errors import ConfigurationError, EngineUnavailableError, PartView, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.modules.unwrap import canonical_name
from accel_core.options.enums import DistributedType, FP8BackendType
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.fp8.backend import choose_backend
from accel_core.precision.precision import Precision
from accel_core.process.world import GroupNeeds
from accel_core.strategies import recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Clip, Parts, PrecisionRequest
from accel_core.strategies.placement import devices_of
from accel_core.strategies.quantized import refuse_packed
from accel_parallel.averaging import Averaging, groups_of, reading_groups
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding import gradients, wrapping
from accel_parallel.sharding.exact import compute_exactly
from accel_parallel.sharding.format import FullyShardedFormat
from accel_parallel.sharding.gather import gather
from accel_parallel.sharding.loading import refuse_empty, starts_from_main, views_in, views_of
from accel_parallel.sharding.mesh import data_mesh
from accel_parallel.sharding.param_attrs import is_half, keep_masters, keeping_marks, refuse_hooks, refuse_mixed
from accel_parallel.sharding.recomputing import recompute
from accel_parallel.sharding.refusals import (
    refuse_copies,
    refuse_gradients_of_gradients,
    refuse_resizing,
    refuse_sparse_gradients,
)
from accel_parallel.sharing import SharingStrategy


class ShardedStrategy(SharingStrategy):
    """Each rank holds a shard of every parameter, its gradient and its optimizer state."""

    plugin_type = FullyShardedDataParallelPlugin
    receives_weights = True
    evaluates_whole = False
    combines: ClassVar[tuple[str, ...]] = ()
    """Axes along which ranks read the same data, and with which sharding is combined."""
    shards_integers: ClassVar[bool] = False
    """Whether integers, as packed weights are stored in, keep their format when they are sharded and gathered."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.plugin: FullyShardedDataParallelPlugin = parts.plugin
        if parts.precision.name != "no":
            self.plugin.set_mixed_precision(parts.precision.name)
        self.mesh = data_mesh(parts)
        self.format = FullyShardedFormat(self.layout_of_states, self.whole_optimizer)
        self.averaging = Averaging(self.world.device, self._readers(parts))

    @classmethod
    def lay_out(
        cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin
    ) -> Layout:
        """Shard over all ranks, or as the axes say.

        Raises:
            ConfigurationError: The axes have none along which parameters are sharded.
            EngineUnavailableError: They have one that this version does not combine with sharding.
        """
        if parallelism is None or parallelism.total_size == 1:
            return cls._without_axes(rank, world_size, plugin)
        axes = [*parallelism.non_dp_dim_names, *(["ep"] if parallelism.ep_enabled else [])]
        others = [axis for axis in axes if axis not in cls.combines]
        if others:
            raise EngineUnavailableError(
                f"{cls.name.upper()} is not combined with tensor, expert, context or sequence parallel in this way; "
                f"got the axes {others}. Use dp_replicate_size and dp_shard_size alone."
            )
        if not any(axis in cls.combines or axis == "dp_shard" for axis in parallelism.dp_shard_cp_dim_names):
            raise ConfigurationError(
                f"FSDP needs an axis along which parameters are sharded; got the axes {parallelism.active_mesh_dims}. "
                "Set dp_shard_size to 2 or more, or leave parallelism_config out to shard over all processes."
            )
        return super().lay_out(rank, world_size, parallelism, plugin)

    @classmethod
    def _without_axes(cls, rank: int, world_size: int, plugin: FullyShardedDataParallelPlugin) -> Layout:
        return Layout.of(rank, world_size, {"dp_shard": world_size})

    @classmethod
    def group_needs(cls, plugin: FullyShardedDataParallelPlugin) -> GroupNeeds:
        """Return that one process needs a group too, and offloaded parameters one that moves what lies on the CPU."""
        return GroupNeeds(alone=True, host=plugin.offloads)

    def _readers(self, parts: Parts) -> list[Any]:
        """Return the groups of ranks over which gradients of whole parameters are averaged."""
        if parts.layout.size("ep", "tp") > 1:
            return reading_groups(parts)
        return [dist.group.WORLD] if self.world.size > 1 else []

    @property
    def layout_of_states(self) -> str:
        """The name of the layout of checkpoints that the plugin asks for."""
        return StateDictType(self.plugin.state_dict_type).name

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the number format of what autocast chooses; that of gathered parameters is the plugin's policy.

        Raises:
            EngineUnavailableError: fp8 through another library than torchao.
        """
        library = choose_backend(list(asked.recipes)) if asked.name == "fp8" else FP8BackendType.AO
        if library is not FP8BackendType.AO:
            raise EngineUnavailableError(
                f"FSDP trains in fp8 through torchao only; got mixed_precision='fp8' through {library.value}. "
                "Pass kwargs_handlers=[AORecipeKwargs()], or use mixed_precision='bf16'."
            )
        return super().precision(asked)

    def label(self) -> DistributedType:
        """Return the label of FSDP."""
        return DistributedType.FSDP

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Also keep what trains in half precision in float32; find blocks again, as fp8 exchanges layers."""
        converted = super().convert(model)
        self.plans[converted] = self.plans[model].found_in(converted)  # by name, as the modules are others
        if self.parts.precision.name != "no":
            with keeping_marks(converted):
                keep_masters(converted)
        return converted

    def place(self, model: torch.nn.Module) -> None:
        """Leave a model where it is: it may fit on no single device, and sharding moves it block by block."""

    def split(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let blocks compute again what they would have kept for backward, if the plugin says so, or in 32 bits."""
        for _, module in self.plans[model].kept:
            compute_exactly(module, self.world.device.type, self.plugin.param_dtype)
        if self.plugin.activation_checkpointing:
            blocks = (block for _, block in self.plans[model].blocks)
            recompute(blocks, offload=bool(self.plugin.activation_checkpointing_offload))
        return model

    def compile_blocks(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the planned blocks in place, as they are sharded, if the run compiles by region."""
        recipe.compile_in_place([block for _, block in self.plans[model].blocks] or [model], self.parts.compilation)
        return model

    def _guarded(self, sharded: torch.nn.Module) -> torch.nn.Module:
        """Return a model that was just sharded, and refuse from now on what it cannot do."""
        if self.forms:
            if sharded is not self._bare(sharded):  # torch refuses to copy what was sharded in place
                refuse_copies(sharded)
            refuse_resizing(self._bare(sharded))
            refuse_gradients_of_gradients(self._bare(sharded))
        return sharded

    def check_optimizers(self, bundle: Bundle) -> None:
        """Also refuse layers whose gradients are sparse."""
        super().check_optimizers(bundle)
        for slot in bundle.models:
            refuse_sparse_gradients(self._bare(slot.given))

    @property
    def forms(self) -> tuple[str, ...]:
        """What parameters are once they are sharded; see `optimizers.Refused`."""
        several = ("several",) if self.world.size > 1 else ()
        return ("distributed", *several, *(("split",) if self.layout.size("tp") > 1 else ()))

    @property
    def mixes(self) -> bool:
        """Whether parameters lie on several meshes, or some are sharded and others whole."""
        return self.layout.size("tp") > 1 or bool(self.averaging)

    def plan(self, model: torch.nn.Module) -> wrapping.WrapPlan:
        """Return how a model will be taken apart; refuse one that cannot be."""
        bare = self._bare(model)
        if self.is_prepared(recipe.inside(model)):
            return wrapping.WrapPlan((), ())
        devices = devices_of(model)
        if len(devices) > 1:
            raise PreparationError(
                f"A model that a device map spreads cannot be sharded; got the devices {', '.join(sorted(devices))}. "
                "Load it without a device map."
            )
        cast, integers = self.plugin.param_dtype, self.shards_integers
        refuse_packed(bare, self.world, self.world.device, cast=cast, integers=integers)
        plan = wrapping.plan(bare, self.plugin, self._left_out(bare))
        if self.plugin.activation_checkpointing:
            plan.refuse_one_piece(bare)
        trained = [name for name in plan.replicated if bare.get_parameter(name).requires_grad]
        if trained and self.number_format.scaler is not None:
            raise PreparationError(
                "The gradient scaler of fp16 cannot mix sharded gradients with whole ones; got parameters that are not "
                f"sharded: {', '.join(trained)}. Use mixed_precision='bf16', freeze them, or shard them."
            )
        self._check_spread(bare)
        self._check_parameters(bare, plan)
        refuse_empty(bare, self.world)
        return plan

    def _left_out(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Return the names of parameters that are not sharded here, because another axis spreads them."""
        return ()

    def _check_parameters(self, model: torch.nn.Module, plan: wrapping.WrapPlan) -> None:
        """Refuse what parameters that are about to be sharded lose, or cannot have in one block."""
        kept = {id(parameter) for parameter in plan.whole(model)}
        refuse_hooks((name, p) for name, p in model.named_parameters() if id(p) not in kept)
        for name, block in (*plan.groups(), ("", model)):
            own = [(n, p) for n, p in block.named_parameters() if id(p) not in kept]
            kept |= {id(parameter) for _, parameter in own}
            self._refuse_mixed(name or type(model).__name__, own)

    def _refuse_mixed(self, block: str, own: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Refuse parameters that cannot be sharded together."""
        reason = "FSDP2 reduces the gradients of a block in one number format"
        refuse_mixed(reason, block, ((name, self._format_of(p)) for name, p in own if p.requires_grad))

    def _format_of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the number format that a parameter will have."""
        masters = self.parts.precision.name != "no" and parameter.requires_grad and is_half(parameter)
        return torch.float32 if masters else parameter.dtype

    def _check_spread(self, model: torch.nn.Module) -> None:
        """Refuse a model whose parameters are spread over ranks in a way that sharding does not combine with."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise PreparationError(
                f"A model is sharded whole or not at all; got {type(model).__name__}, parts of which are sharded. "
                "Prepare the model as it was loaded, or shard all of it."
            )

    def _starts_from_main(self, model: torch.nn.Module) -> bool:
        """Return whether all ranks take the values of the first; every rank calls it."""
        return starts_from_main(model, self.world, bool(self.plugin.cpu_ram_efficient_loading))

    @abstractmethod
    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model was sharded before, here or by its user."""

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients, sharded or whole, down to a common norm; returns a plain scalar, the same on all ranks."""
        return gradients.clip_norm(self._names.trained(clip.parameters), clip.limit, clip.norm_type, self.groups_of)

    def groups_of(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Return the groups of ranks that share a parameter's gradient; none where every rank holds it whole."""
        return groups_of(parameter)

    def clip_grad_value_(self, clip: Clip) -> None:
        """Clip each gradient element, wherever it lies."""
        gradients.clip_value(self._names.trained(clip.parameters), clip.limit)

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Return the names and weights that `save_model` writes; every rank calls it, and gathers them as they come."""
        with in_step(self.world, "save_model", views_of(self._bare(model))):
            pass  # a rank that stays away is named here; in a gather, gloo would end the process
        return super().weights(model)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state on the first rank, and nothing on the others.

        The first rank of each machine, that is. Every rank gets it where the plugin has
        `state_dict_config=FullStateDictConfig(rank0_only=False)`.
        """
        config = self.plugin.state_dict_config
        everywhere = isinstance(config, FullStateDictConfig) and not config.rank0_only
        return self.whole_state(model, keep=everywhere or self.world.is_local_main)

    def whole_state(self, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
        """Gather a model's state under its bare names; every rank calls it."""
        state = {canonical_name(name): value for name, value in self._bare(model).state_dict().items()}
        with in_step(self.world, "the state dict of a sharded model", views_in(state)):
            found: dict[str, Any] = gather(state, keep=keep)
        return found if keep else {}

    def whole_optimizer(self, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
        """Gather the state of an optimizer as torch's optimizers write it; every rank calls it."""
        state = optimizer.state_dict()
        of_parameters = {f"{key}": PartView(" ".join(map(str, one))) for key, one in state["state"].items()}
        with in_step(self.world, "the state of a sharded optimizer", of_parameters):
            found: dict[str, Any] = gather(state, keep=keep)
        return found
