"""The search for the smallest layout on which a training step fits."""

from collections.abc import Callable, Iterator

from torch import nn

from accel_core.errors import AccelError
from accel_core.mesh.layout import SHARD_AXES
from accel_core.mesh.spec import LayoutSpec, parse_layout
from accel_core.modules.sizes import tensor_bytes
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding import wrapping
from accel_plan.training.prediction import TrainingMemory, predict
from accel_plan.training.workload import TrainingWorkload


def ways_of(model: nn.Module, checkpointing: bool | None) -> list[bool]:
    """Return whether activations are computed again in blocks: as asked, or without and with, if a model has blocks."""
    if checkpointing is not None:
        return [checkpointing]
    return [False, True] if wrapping.plan(model, FullyShardedDataParallelPlugin(fsdp_version=2)).blocks else [False]


def candidates(ranks: int) -> Iterator[LayoutSpec]:
    """Yield layouts of up to so many ranks, in powers of two: fewer ranks first, and of equally many the simplest.

    Examples:
        >>> [spec.name for spec in candidates(2)]
        ['single', 'dp2', 'fsdp2', 'tp2', 'cp2', 'zero3x2', 'pp2']
    """
    yield parse_layout("single")
    size = 2
    while size <= ranks:
        half = [f"fsdp{size // 2}x{axis}2" for axis in ("tp", "cp", "pp") if size > 2]
        for name in (f"dp{size}", f"fsdp{size}", *half, f"tp{size}", f"cp{size}", f"zero3x{size}", f"pp{size}"):
            yield parse_layout(name)
        size *= 2


def _shards(spec: LayoutSpec) -> int:
    """Return into how many parts a layout divides weights and gradients."""
    if spec.engine == "deepspeed":
        return spec.ranks
    axes = (*SHARD_AXES, "tp", "pp") if spec.engine == "fsdp" else ("tp", "pp")
    return spec.size(*axes)


def tried(
    make_model: Callable[[], nn.Module],
    workload: TrainingWorkload,
    limit: int,
    *,
    ranks: int = 8,
    checkpointing: bool | None = None,
) -> Iterator[TrainingMemory]:
    """Yield the memory of a training step on one layout after the other, up to the first on which it fits.

    Layouts are tried as `candidates` yields them, each without checkpointing of activations first; those that cannot
    share out this model or batch, and those on which weights and gradients alone do not fit, are left out.
    """
    model = make_model()
    # When the optimizer steps, a rank has its weights and their gradients at least.
    needed = sum(tensor_bytes(each, workload.dtype) * (1 + each.requires_grad) for each in model.parameters())
    ways = ways_of(model, checkpointing)
    for spec in candidates(ranks):
        if needed / _shards(spec) > limit:
            continue
        try:
            for way in ways:
                found = predict(make_model, spec, workload, checkpointing=way)
                yield found
                if found.peak <= limit:
                    return
        except AccelError:
            if spec.ranks == 1:  # what is wrong is not the layout
                raise
