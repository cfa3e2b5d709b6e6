"""Streams that end together: ranks agree, before every batch, on who has another one.

Each rank reads one batch ahead and tells the others, in one collective of a few bytes, how many rows it holds. So no
rank waits for one that has run out, and everybody knows which batch is the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from accel_core.comm.objects import broadcast_object_list
from accel_core.data.rows import count_rows, take_rows
from accel_core.data.samplers import TallyBatch, get_sampler
from accel_core.data.shard import Tally
from accel_core.errors import RemoteRankError
from accel_core.logging import get_logger
from accel_core.process import world
from accel_core.process.world import World
from accel_core.state.gradient import GradientState

__all__ = ["Ending", "meet"]

_logger = get_logger(__name__)
_END: Any = object()
_ENDED, _FAILED, _UNCOUNTED = -1, -2, -3


class Ending(Protocol):
    """A loader of which it is told how it ends.

    Attributes:
        end_of_dataloader (bool): Whether the batch given last is the last one.
        remainder (int): Number of real samples in the last global batch.
        tally (Tally | None): What each rank holds, where that is not a full and real part of the data.
        uneven_end (str): What is done where streams differ in length: "drop", "repeat" or "empty".
    """

    end_of_dataloader: bool
    remainder: int
    tally: Tally | None
    uneven_end: str

    @property
    def gradient_state(self) -> GradientState:
        """The state that the steps of all loaders are noted in."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, where that is fixed."""


def meet(loader: Ending, stream: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until the streams of all ranks have ended, as `loader.uneven_end` says.

    Args:
        loader: The loader; its end, remainder and tally are set before each batch is yielded.
        stream: This rank's batches.

    Raises:
        RemoteRankError: Reading failed on another rank.
    """
    here = world.ensure()
    advance = loader.gradient_state._advance
    repeats: list[Any] = []
    batch, counts = _next(loader, stream, here, repeats)
    while counts is not None:
        following, following_counts = _next(loader, stream, here, repeats)
        tally = _tally(loader, batch, counts, last=following_counts is None)
        loader.tally = tally
        if following_counts is None:
            loader.end_of_dataloader = True
            total = sum(counts) if tally is None else tally.total
            loader.remainder = -1 if min(counts) < 0 and tally is None else total
        advance(loader)
        yield batch.batch if type(batch) is TallyBatch else batch
        batch, counts = following, following_counts


def _next(loader: Ending, stream: Iterator[Any], here: World, repeats: list[Any]) -> tuple[Any, tuple[int, ...] | None]:
    """Read a batch and tell the others.

    Returns:
        The batch, and the number of real rows of every rank; `None` where the data is at its end.
    """
    failure: Exception | None = None
    batch: Any = _END
    try:
        batch = next(stream, _END)
    except Exception as error:
        failure = error
    mine = _FAILED if failure is not None else _ENDED if batch is _END else _rows(loader, batch)
    counts = _exchange(mine, here)
    if failure is not None:
        raise failure
    if _FAILED in counts:
        failed = [rank for rank, count in enumerate(counts) if count == _FAILED]
        raise RemoteRankError(
            f"Reading the next batch failed on rank {', '.join(map(str, failed))}; rank {here.rank} learned of it when "
            "it asked for its own. The error is in that rank's output."
        )
    ended = [rank for rank, count in enumerate(counts) if count == _ENDED]
    if len(ended) == here.size:
        return _END, None
    if not ended:
        if loader.uneven_end != "drop" and not repeats:
            repeats.append(batch)
        return batch, counts
    if loader.uneven_end == "drop":
        _logger.warning_once(
            f"The streams of the ranks differ in length: rank {', '.join(map(str, ended))} ran out first, and what the "
            "others still hold is left out. Choose uneven_end='repeat' or 'empty' to read it."
        )
        return _END, None
    return _fill(loader, batch, counts, here, repeats), tuple(max(count, 0) for count in counts)


def _fill(loader: Ending, batch: Any, counts: tuple[int, ...], here: World, repeats: list[Any]) -> Any:
    """Return a batch for a rank that has run out, and the rank's own for the others."""
    if not hasattr(loader, "_lent") or loader.__dict__["_lent"] is None:
        lender = next(rank for rank, count in enumerate(counts) if count != _ENDED)
        loader.__dict__["_lent"] = broadcast_object_list([batch if here.rank == lender else None], lender)[0]
    if batch is not _END:
        return batch
    spare = repeats[0] if repeats else loader.__dict__["_lent"]
    spare = spare.batch if type(spare) is TallyBatch else spare
    return spare if loader.uneven_end == "repeat" else take_rows(spare, slice(0, 0), count_rows(spare))


def _rows(loader: Ending, batch: Any) -> int:
    rows = count_rows(batch.batch if type(batch) is TallyBatch else batch, loader.batch_size)
    return _UNCOUNTED if rows is None else rows


def _tally(loader: Ending, batch: Any, counts: tuple[int, ...], last: bool) -> Tally | None:
    """Return what each rank holds, where that is not a full and real part of the data."""
    if type(batch) is TallyBatch:
        tally: Tally = batch.tally
        return tally
    if 0 in counts:
        mine = count_rows(batch, loader.batch_size) or 0
        rows = tuple(count or (mine if loader.uneven_end == "repeat" else 0) for count in counts)
        return Tally(tuple(max(row, 1) for row in rows), tuple(max(count, 0) for count in counts))
    return _without_padding(loader, counts) if last else None


def _without_padding(loader: Ending, counts: tuple[int, ...]) -> Tally | None:
    """Leave out what torch's DistributedSampler repeats to give all ranks equally many."""
    sampler = get_sampler(loader)
    if type(sampler) is not DistributedSampler or sampler.drop_last or min(counts) < 1:
        return None
    whole = len(sampler.dataset) % sampler.num_replicas  # type: ignore[arg-type]
    if not whole:
        return None
    return Tally(counts, tuple(count - (rank >= whole) for rank, count in enumerate(counts)))


def _exchange(mine: int, here: World) -> tuple[int, ...]:
    """Give every rank every rank's number."""
    group = _host_group(id(dist.group.WORLD)) if here.backend != "gloo" else None
    told = torch.empty(here.size, dtype=torch.int64)
    dist.all_gather_single(told, torch.tensor([mine]), group=group)
    return tuple(told.tolist())


@functools.lru_cache(maxsize=4)
def _host_group(of_world: int) -> Any:
    """Return a group of all ranks that exchanges host memory, so that agreeing never waits for a device."""
    del of_world
    return dist.new_group(backend="gloo")
