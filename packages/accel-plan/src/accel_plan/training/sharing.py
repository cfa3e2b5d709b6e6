"""A model on one rank of a layout: split, sharded and averaged by the code that trains, in a process of its own."""

from collections.abc import Iterable, Iterator
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
from accel_parallel.sharding.param_attrs import keep_masters
from accel_parallel.sharding.recomputing import recompute
from accel_parallel.tensor.plan import plan_of
from accel_parallel.tensor.split import cut
from accel_plan._torch import fake_store, tree_leaves
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.workload import TrainingWorkload, call_of

_CPU = torch.device("cpu")


def check_layout(spec: LayoutSpec, workload: TrainingWorkload) -> None:
    """Refuse a layout that cannot share a step out.

    Raises:
        ConfigurationError: The batch or its sequences cannot be shared out evenly.
        EngineUnavailableError: An engine or axis whose memory is not found here.
    """
    pipelined, zero = spec.size("pp") > 1, spec.zero_stage is not None
    unplanned = {
        "a pipeline with chunk_logits": pipelined and workload.chunk_logits,
        "a pipeline with ep, cp or tp": pipelined and spec.size("ep", "cp", "tp") > 1,
        f"FSDP with schedule={workload.schedule!r}": pipelined
        and spec.engine == "fsdp"
        and workload.schedule in SPLIT_BACKWARD,
        "DeepSpeed with sp": zero and spec.size("sp") > 1,
        f"DeepSpeed, which chooses the dtype of weights by its mixed precision, with dtype={workload.dtype}": zero
        and workload.dtype not in (None, torch.float32),
    }
    found = [words for words, there in unplanned.items() if there]
    if found:
        raise EngineUnavailableError(
            f"The memory of some combinations is not planned; got {', '.join(found)} for {spec.name}. Leave one out."
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


def weights_dtype(spec: LayoutSpec, workload: TrainingWorkload) -> torch.dtype | None:
    """Return the dtype that parameters and batches of numbers are converted to; `None` where they stay as they are."""
    # DeepSpeed's engine holds parameters in the dtype of mixed precision, and casts no batch.
    casts = {"bf16": torch.bfloat16, "fp16": torch.float16} if spec.zero_stage is not None else {}
    return casts.get(workload.precision, workload.dtype)


class SharedModel:
    """A model as the first rank of a layout holds it, whose parts are never smaller than those of others.

    Attributes:
        model: The model, split and sharded.
        kept: What a loop has in its variables until they are assigned again.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LayoutSpec,
        workload: TrainingWorkload,
        checkpointing: bool,
        mesh: DeviceMesh | None,
    ) -> None:
        self.model, self.kept = model, dict[str, object]()
        self._spec, self._workload, self._mesh = spec, workload, mesh
        self._sharded = spec.engine == "fsdp"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        if workload.precision != "no":
            plugin.set_mixed_precision(workload.precision)
        experts = experts_of(model, spec.size("ep")) if spec.size("ep") > 1 else {}
        plan = wrapping.plan(model, plugin, parameter_names(model, experts))
        if workload.chunk_logits:
            ask(model, None)
        head = asked_head(model) if self._sharded and spec.size("tp") == 1 else None
        plan = plan if head is None else plan.with_head(model, head)
        if workload.precision != "no" and spec.zero_stage is None:
            self._cast()
            if self._sharded:
                keep_masters(model)
        if spec.size("tp") > 1:
            assert mesh is not None
            cut(model, plan_of(model, workload.tensor_plan, spec.size("tp")), mesh["tp"])
        cast = plugin.param_dtype if self._sharded else None
        for module in experts.values():
            assert mesh is not None
            spread_experts(module, mesh["ep"], _CPU, cast=cast, route=routed_evenly)
        if checkpointing:
            plan.refuse_one_piece(model)
            recompute((block for _, block in plan.blocks), offload=False)
        if self._sharded:
            whole = plan.whole(model)
            self._shard((*(block for _, block in plan.groups()), model), plugin, set(whole))
        if head is not None:
            slice_heads(model, plugin.mixed_precision_policy)
        apply_where_asked(model)

    def _cast(self) -> None:
        """Compute in the number format of mixed precision."""
        precision = self._workload.precision
        AutocastPrecision(precision, _CPU, AutocastKwargs(), GradScalerKwargs(), scale=False).wrap(self.model)

    def _shard(
        self, blocks: Iterable[nn.Module], plugin: FullyShardedDataParallelPlugin, whole: set[nn.Parameter]
    ) -> None:
        assert self._mesh is not None
        arguments: dict[str, Any] = arguments_of(plugin, sharding_part(self._mesh), _CPU)
        for block in blocks:
            fully_shard(block, ignored_params=whole or None, **arguments)

    def reduce_gradients(self, wanted: bool) -> None:
        """Let the next backward pass reduce gradients, or add them up as they are: whole, under FSDP."""
        if self._sharded:
            sharded: Any = self.model
            sharded.set_requires_gradient_sync(wanted)

    def run(self, inputs: torch.Tensor, counter: LiveBytes) -> None:
        """Run one forward and backward pass."""
        attention: AbstractContextManager[None] = nullcontext()
        if self._spec.size("cp") > 1:
            assert self._mesh is not None
            share = Share(self._workload.sequence or 0, 0, self._spec.size("cp"))
            attention = attending(GatheredAttention(self._mesh.get_group("cp"), share))
        with attention:
            counter.purpose = "activations"
            args, kwargs = call_of(self.model, inputs)
            self.kept["output"] = output = self.model(*args, **kwargs)
            numbers = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
            counter.note([local_part(each) for each in numbers if each.is_floating_point()], "logits")
            self.kept["loss"] = loss = self._workload.loss_of(output, inputs)
            counter.purpose = "workspace"
            loss.backward()  # type: ignore[no-untyped-call]


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
