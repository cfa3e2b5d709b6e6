"""Which blocks of a model each stage of a pipeline runs, and which rank runs which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

from torch import nn

from accel_core._records import record
from accel_core.errors import PreparationError
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.sharding.wrapping import repeated_blocks

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Schedules that compute gradients of inputs and of weights apart."""

_ALONE = ("gpipe", "1f1b")
"""Schedules that give each rank one stage."""

_V_SHAPED = ("zbv_zero_bubble", "dualpipev")
"""Schedules in which the first rank has the first stage and the last, the second rank those inside of them."""

_WHOLE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_PER_RANK = 2
"""Stages of a rank in all other schedules, if they are not cut by hand."""


@record(frozen=True)
class Stages:
    """How a model is cut.

    Attributes:
        blocks: Names of the blocks, in the order of their calls.
        starts: For each stage, the number of its first block.
        ranks: For each stage, the place along the axis of the rank that runs it.
        parts: Into how many micro-batches a batch is divided.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: int

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.starts)

    def span(self, stage: int) -> tuple[int, int]:
        """Return the first block of a stage, and the one after its last."""
        return self.starts[stage], (*self.starts, len(self.blocks))[stage + 1]

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages that a rank runs, in their order."""
        return [stage for stage, other in enumerate(self.ranks) if other == rank]


def lay_out(model: nn.Module, settings: PipelineKwargs, ranks: int) -> Stages:
    """Cut a model into stages; changes nothing.

    Raises:
        PreparationError: It has no repeated blocks, or fewer than stages, layers that look at the whole batch, or
            `split` names something that is not a block.
    """
    kind = type(model).__name__
    whole = [name for name, part in model.named_modules() if isinstance(part, _WHOLE_BATCH)]
    if whole:
        raise PreparationError(
            "Batch normalization looks at the whole batch, of which a pipeline computes one micro-batch at a time; got "
            f"{', '.join(whole[:3])} in {kind}. Use a norm of single samples, or dp_replicate_size instead of pp_size."
        )
    blocks = repeated_blocks(model)
    if not blocks:
        raise PreparationError(
            f"A pipeline is cut between blocks of one class that a ModuleList or Sequential holds; got {kind}, which "
            "has none. Put its layers into a ModuleList, or use another parallelism."
        )
    names = [*blocks]
    starts = _by_hand(names, settings.split) if settings.split else _even(model, blocks, _stages(settings, ranks))
    count, wanted = len(starts), _stages(settings, ranks)
    several = settings.schedule not in (*_ALONE, *_V_SHAPED)
    if count != wanted and not (several and settings.split and count % ranks == 0):
        raise PreparationError(
            f"The schedule {settings.schedule!r} has {wanted} stages on {ranks} ranks; got {count} from split="
            f"{settings.split}. Name the first block of each stage but the first."
        )
    parts = settings.microbatches or 2 * ranks
    least = count if settings.schedule in ("1f1b", "dualpipev") else 1
    rounds = max(1, parts // ranks) if settings.schedule.startswith("interleaved") else 1
    if parts < least or parts % rounds:
        raise PreparationError(
            f"The schedule {settings.schedule!r} runs on {least} micro-batches or more, in rounds of as many as ranks; "
            f"got microbatches={parts} for {count} stages on {ranks} ranks. Use a multiple of {max(least, ranks)}."
        )
    folded = settings.schedule in _V_SHAPED
    places = tuple(min(stage, count - 1 - stage) if folded else stage % ranks for stage in range(count))
    return Stages(tuple(names), tuple(starts), places, parts)


def _stages(settings: PipelineKwargs, ranks: int) -> int:
    return ranks * (1 if settings.schedule in _ALONE else _PER_RANK)


def _by_hand(names: list[str], split: Sequence[str]) -> list[int]:
    unknown = [name for name in split if name not in names[1:]]
    places = [names.index(name) for name in split if name in names]
    if unknown or sorted(set(places)) != places:
        raise PreparationError(
            f"split names blocks with which stages begin, in their order; got {list(split)}. Use some of "
            f"{', '.join(names[1:4])} … {names[-1]}."
        )
    return [0, *places]


def _even(model: nn.Module, blocks: Mapping[str, nn.Module], stages: int) -> list[int]:
    """Return the first blocks of stages of which the largest holds as few bytes as it can."""
    if len(blocks) < stages:
        raise PreparationError(
            f"Each stage of a pipeline has a block at least; got {len(blocks)} blocks in {type(model).__name__} for "
            f"{stages} stages. Use a smaller pp_size, or a schedule with fewer stages."
        )
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks.values()]
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    order = [*model.parameters()]
    first = next((place for place, parameter in enumerate(order) if id(parameter) in inside), 0)
    # What is listed before the blocks is mostly needed by the first, what comes after them by the last.
    sizes[0] += sum(parameter.nbytes for parameter in order[:first])
    sizes[-1] += sum(parameter.nbytes for parameter in order[first:] if id(parameter) not in inside)
    return cut_evenly(sizes, stages)


def cut_evenly(sizes: Sequence[float], stages: int) -> list[int]:
    """Return the first blocks of stages of which the largest is as small as it can be."""
    before = [0.0, *accumulate(sizes)]

    @cache
    def cut(count: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest of some stages before a block, and where they begin."""
        if count == 1:
            return before[end], (0,)
        tries = ((start, *cut(count - 1, start)) for start in range(count - 1, end))
        return min((max(most, before[end] - before[start]), (*starts, start)) for start, most, starts in tries)

    return list(cut(stages, len(sizes))[1])
