"""The smallest layout on which a training step fits."""

from collections.abc import Callable, Iterator

from torch import nn

from accel_core.errors import AccelError, ConfigurationError
from accel_core.mesh.layout import SHARD_AXES
from accel_core.mesh.spec import LayoutSpec, parse_layout
from accel_core.modules.sizes import tensor_bytes, written_size
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding import wrapping
from accel_plan.training.prediction import TrainingMemory, predict
from accel_plan.training.workload import TrainingWorkload

__all__ = ["candidates", "has_blocks", "smallest"]


def has_blocks(model: nn.Module) -> bool:
    """Return whether a model has blocks whose activations can be computed again."""
    return bool(wrapping.plan(model, FullyShardedDataParallelPlugin(fsdp_version=2)).blocks)


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


def smallest(
    make_model: Callable[[], nn.Module],
    workload: TrainingWorkload,
    limit: int,
    *,
    ranks: int = 8,
    checkpointing: bool | None = None,
    report: Callable[[TrainingMemory], object] = lambda _: None,
) -> TrainingMemory:
    """Return the memory of a training step on the smallest layout on which each rank's part fits.

    Layouts are tried as `candidates` yields them, each without checkpointing of activations first; those that cannot
    share out this model or batch are left out.
    """
    model = make_model()
    # When the optimizer steps, a rank has its weights and their gradients at least.
    needed = sum(tensor_bytes(each, workload.dtype) * (1 + each.requires_grad) for each in model.parameters())
    ways = [checkpointing] if checkpointing is not None else [False, True] if has_blocks(model) else [False]
    best: TrainingMemory | None = None
    for spec in candidates(ranks):
        if needed / _shards(spec) > limit:
            continue
        try:
            for way in ways:
                found = predict(make_model, spec, workload, checkpointing=way)
                report(found)
                if found.peak <= limit:
                    return found
                best = found if best is None or found.peak < best.peak else best
        except AccelError:
            if spec.ranks == 1:  # what is wrong is not the layout
                raise
    least = (
        "more than that for weights and gradients" if best is None else f"{written_size(best.peak)} on {best.layout}"
    )
    raise ConfigurationError(
        f"A training step has to fit on each rank; got {written_size(limit)} a rank and up to {ranks} ranks, and it "
        f"needs {least} at least. Allow more ranks, or make the batch smaller."
    )
