"""A model on one rank of a layout: split, sharded and averaged by the code that trains, in a process of its own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from accel_core.errors import ConfigurationError, EngineUnavailableError, StateError
from accel_core.host.versions import require_torch
from accel_core.mesh.layout import MESH_AXES, SHARD_AXES
from accel_core.mesh.spec import LayoutSpec
from accel_core.mesh.tensor import local_part
from accel_core.modules.linear_loss import apply_where_asked, ask, asked_head
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.autocast import AutocastPrecision
from accel_parallel.context.attention import GatheredAttention
from accel_parallel.context.interception import attending
from accel_parallel.context.order import Share
from accel_parallel.experts.dispatch import routed_evenly
from accel_parallel.experts.layers import experts_of, parameter_names
from accel_parallel.experts.parallel import spread_experts
from accel_parallel.fsdp2.in_place import arguments_of
from accel_parallel.fsdp2.sliced_loss import slice_heads
from accel_parallel.pipeline.stages import SPLIT_BACKWARD
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding import wrapping
from accel_parallel.sharding.mesh import sharding_part
from accel_parallel.sharding.recomputing import recompute
from accel_parallel.sharding.strategy import keep_masters
from accel_parallel.tensor.plan import plan_of
from accel_parallel.tensor.split import cut
from accel_plan._torch import fake_store
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.workload import TrainingWorkload
from accel_plan.training.zero import ZeroShare

__all__ = ["SharedModel", "check_layout", "laid_out", "weights_dtype"]

_CPU = torch.device("cpu")


def check_layout(spec: LayoutSpec, workload: TrainingWorkload) -> None:
    """Refuse a layout that cannot share a step out.

    Raises:
        ConfigurationError: The batch or its sequences cannot be shared out evenly.
        EngineUnavailableError: An engine or axis whose memory is not found here.
    """
    if spec.engine == "deepspeed":
        _check_zero(spec, workload)
    others = [axis for axis in ("ep", "cp", "tp") if spec.size(axis) > 1 < spec.size("pp")]
    if workload.chunk_logits and spec.size("pp") > 1:
        raise EngineUnavailableError(
            f"A pipeline computes its loss from the logits of its last stage; got chunk_logits and {spec.name}. Leave "
            "chunk_logits out."
        )
    if others:
        raise EngineUnavailableError(
            f"A pipeline is combined with dp and fsdp; got pp and {', '.join(others)} in {spec.name}. Leave one out."
        )
    if spec.size("pp") > 1 and spec.engine == "fsdp" and workload.schedule in SPLIT_BACKWARD:
        raise EngineUnavailableError(
            "FSDP shards the stages of pipelines whose schedule computes gradients of inputs and of weights together; "
            f"got schedule={workload.schedule!r} for {spec.name}. Use gpipe, 1f1b or interleaved_1f1b."
        )
    if spec.engine == "fsdp" and spec.size(*SHARD_AXES) == 1 < spec.ranks:
        raise ConfigurationError(
            f"FSDP shards over 2 or more ranks, or over the one there is; got {spec.name}. Leave fsdp1 out."
        )
    replicas = spec.layout().replicas
    if workload.batch % replicas:
        raise ConfigurationError(
            f"Ranks that read different data divide a batch into equal parts; got batch={workload.batch} for "
            f"{replicas} of them in {spec.name}. Use a batch that {replicas} divides."
        )
    if spec.size("cp") > 1:
        if workload.sequence is None:
            raise ConfigurationError(
                f"Context parallel shares the tokens of sequences; got {spec.name} and samples without a sequence. "
                "Give --sequence, or leave cp out."
            )
        Share(workload.sequence, 0, spec.size("cp")).check()


def _check_zero(spec: LayoutSpec, workload: TrainingWorkload) -> None:
    """Refuse what DeepSpeed's engine does in a way that is not traced."""
    if spec.size("sp") > 1:
        raise EngineUnavailableError(
            f"Memory of DeepSpeed's engine is predicted without sp; got the layout {spec.name}. Leave sp out, and plan "
            "the part of the sequence that one rank reads."
        )
    if workload.dtype not in (None, torch.float32):
        raise EngineUnavailableError(
            f"DeepSpeed's engine chooses the dtype of weights by its mixed precision; got dtype={workload.dtype} for "
            f"{spec.name}. Use --mixed-precision without --dtype."
        )


def weights_dtype(spec: LayoutSpec, workload: TrainingWorkload) -> torch.dtype | None:
    """Return the dtype that parameters and batches of numbers are converted to; `None` where they stay as they are."""
    # DeepSpeed's engine holds parameters in the dtype of mixed precision, and casts no batch.
    casts = {"bf16": torch.bfloat16, "fp16": torch.float16} if spec.zero_stage is not None else {}
    return casts.get(workload.precision, workload.dtype)


class _Attention(GatheredAttention):
    """Attention over all ranks, none of which says that it refuses."""

    def _note(self, refusals: torch.Tensor) -> None:
        pass


class SharedModel:
    """A model as the first rank of a layout holds it, whose parts are never smaller than those of others."""

    def __init__(
        self,
        model: nn.Module,
        spec: LayoutSpec,
        workload: TrainingWorkload,
        checkpointing: bool,
        mesh: DeviceMesh | None,
    ) -> None:
        self.model = model
        self._spec, self._mesh = spec, mesh
        self._sharded = spec.engine == "fsdp"
        plugin = self._plugin(workload.precision)
        experts = experts_of(model, spec.size("ep")) if spec.size("ep") > 1 else {}
        plan = wrapping.plan(model, plugin, parameter_names(model, experts))
        if workload.chunk_logits:
            ask(model, None)
        head = asked_head(model) if self._sharded and spec.size("tp") == 1 else None
        plan = plan if head is None else plan.with_head(model, head)
        if workload.precision != "no" and spec.zero_stage is None:
            AutocastPrecision(workload.precision, _CPU, AutocastKwargs(), GradScalerKwargs(), scale=False).wrap(model)
            if self._sharded:
                keep_masters(model)
        if spec.size("tp") > 1:
            assert mesh is not None
            cut(model, plan_of(model, workload.tensor_plan, spec.size("tp")), mesh["tp"])
        cast = getattr(plugin.mixed_precision_policy, "param_dtype", None) if self._sharded else None
        for module in experts.values():
            assert mesh is not None
            spread_experts(module, mesh["ep"], _CPU, cast=cast, route=routed_evenly)
        if checkpointing:
            plan.refuse_one_piece(model)
            recompute((block for _, block in plan.blocks), offload=False)
        self._whole = list(model.parameters())
        if self._sharded:
            self._whole = plan.whole(model)
            self._shard(plan, plugin)
        if head is not None:
            slice_heads(model, plugin.mixed_precision_policy)
        apply_where_asked(model)
        self.buckets = self._make_buckets()
        stage = spec.zero_stage
        self.zero = None if stage is None else ZeroShare(model, stage, spec.ranks, workload.reduce_bucket)

    @staticmethod
    def _plugin(precision: str) -> FullyShardedDataParallelPlugin:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        if precision != "no":
            plugin.set_mixed_precision(precision)
        return plugin

    def _shard(self, plan: wrapping.WrapPlan, plugin: FullyShardedDataParallelPlugin) -> None:
        assert self._mesh is not None
        arguments: dict[str, Any] = arguments_of(plugin, sharding_part(self._mesh), _CPU)
        if self._whole:
            arguments["ignored_params"] = set(self._whole)
        for block in (*(block for _, block in (*plan.blocks, *plan.heads)), self.model):
            fully_shard(block, **arguments)

    def _make_buckets(self) -> list[torch.Tensor]:
        """Make what `DistributedDataParallel` makes: buckets for all gradients, beside the gradients."""
        if self._spec.engine != "ddp":
            return []
        return [torch.empty_like(parameter) for parameter in self._whole if parameter.requires_grad]

    def gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return this rank's part of the gradients."""
        found = self.model.parameters() if parameters is None else parameters
        sums = [] if self.zero is None else self.zero.sums
        return [*sums, *(local_part(parameter.grad) for parameter in found if parameter.grad is not None)]

    def attend(self, sequence: int | None, counter: LiveBytes) -> AbstractContextManager[None]:
        """Return the context of a forward and backward pass."""
        size = self._spec.size("cp")
        if self.zero is not None:
            return self.zero.passing(counter)
        if size == 1 or self._mesh is None or sequence is None:
            return nullcontext()
        return attending(_Attention(self._mesh.get_group("cp"), Share(sequence, 0, size)))

    def reduce_gradients(self, wanted: bool) -> None:
        """Let the next backward pass reduce gradients, or add them up as they are: whole, under FSDP."""
        if self._sharded:
            sharded: Any = self.model
            sharded.set_requires_gradient_sync(wanted)

    def watch(self, note: Callable[[Iterable[torch.Tensor], str], None]) -> None:
        """Say what an engine has."""
        for purpose, tensors in ({} if self.zero is None else self.zero.held).items():
            note(tensors, purpose)

    def step(self, optimizer: torch.optim.Optimizer, note: Callable[[Iterable[torch.Tensor], str], None]) -> None:
        """Let an optimizer step."""
        if self.zero is None:
            optimizer.step()
        else:
            self.zero.step(optimizer, note)


@contextmanager
def laid_out(spec: LayoutSpec, rank: int = 0) -> Iterator[DeviceMesh | None]:
    """Lay out the mesh of a layout in a process group of which only one rank is there, and none is asked.

    Raises:
        StateError: This process is in a process group already.
        TorchVersionError: The layout has several ranks, and the installed torch cannot stand for them.
    """
    if spec.engine in ("single", "deepspeed"):
        yield None
        return
    require_torch("training_plan")
    if dist.is_initialized():
        raise StateError(
            "Memory of training is found in a process of its own, on torch's fake process group; got one that is in a "
            "process group already. Run `accel plan --train` beside the training."
        )
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=spec.ranks)
    try:
        sizes: dict[str, Any] = {f"{axis}_size": spec.size(axis) for axis in MESH_AXES}
        mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
        if mesh is None and spec.engine == "fsdp":  # of one rank there are no axes, and FSDP wants one
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        yield mesh
    finally:
        dist.destroy_process_group()
