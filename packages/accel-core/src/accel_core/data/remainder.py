"""Gathering what was computed from batches, each sample once."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_core.comm.collectives import gather, recursively_apply, send_to_device
from accel_core.comm.objects import swap
from accel_core.data.rows import count_rows, holds_tensor, join_rows, take_rows
from accel_core.data.shard import Cut, Tally
from accel_core.data.wire import bytes_of
from accel_core.errors import RankDisagreementError
from accel_core.process import world
from accel_core.process.world import World

__all__ = ["drop_duplicates", "gather_for_metrics"]


def gather_for_metrics(input_data: Any, gradient_state: Any, use_gather_object: bool = False) -> Any:
    """Gather what all ranks computed from their current batches, without what is there twice.

    The loader being read tells which samples of the step are repeats that fill up the last global batch: their rows
    are dropped. Rows come in the order of the sampler. Where ranks have no batch in the last step
    (`even_batches=False`), those that have one gather among themselves.

    Args:
        input_data: A nest of tensors with one row (or the same number of rows) a sample; a list with one item a
            sample; or a mapping or tuple of such. Tensors without dims count as one value a rank.
        gradient_state: Knows the loader being read.
        use_gather_object: Gather as pickled objects even if all leaves are tensors; a list, or the rows of a tensor,
            are put into one list with those of the other ranks.

    Returns:
        The same structure with the rows of all ranks. Tensors whose shapes differ between ranks come back as a list of
        one tensor a sample. With one process, `input_data`; only of a tensor with a row for each place of a full
        batch, as libraries make from a mean loss, the rows of the samples that the last, shorter batch holds.

    Raises:
        CollectiveError: An object cannot be pickled.
        RemoteRankError: Another rank failed.
    """
    here = world.ensure()
    if here.size == 1:
        return _cut_to_last_batch(input_data, gradient_state)
    loader = gradient_state.active_dataloader
    tally: Tally | None = getattr(loader, "tally", None)
    cut: Cut | None = getattr(loader, "cut", None)
    if tally is not None and len(tally.rows) != here.size:
        tally = None
    if tally is not None and len(tally.readers) < here.size:
        held = [tally.rows[rank] for rank in tally.readers]
        return _merge(_swap_among(input_data, tally.readers, here), held, None)
    if not use_gather_object and _all_tensors(input_data):
        try:
            gathered = gather(input_data)
        except RankDisagreementError as failure:
            if not _only_sizes_differ(failure):
                raise
        else:
            return gathered if tally is None else drop_duplicates(gathered, tally)
    size = None if cut is None or cut.step_samples is None else cut.step_samples // cut.ranks
    rows: list[int | None] = [size] * here.size if tally is None else list(tally.rows)
    parts = swap(_to_host(input_data), "gather_for_metrics", here)
    return _to_device(_merge(parts, rows, tally, as_list=use_gather_object), input_data)


def _cut_to_last_batch(value: Any, gradient_state: Any) -> Any:
    """Cut tensors that have a row for each place of a full batch to the samples that the last batch holds."""
    cut: Cut | None = getattr(gradient_state.active_dataloader, "cut", None)
    held = gradient_state.remainder
    if not gradient_state.end_of_dataloader or held <= 0 or cut is None or cut.batch_size is None:
        return value
    full = cut.batch_size
    return recursively_apply(lambda leaf: leaf[:held] if leaf.ndim and len(leaf) == full else leaf, value)


def _only_sizes_differ(failure: RankDisagreementError) -> bool:
    """Tell whether all ranks gathered the same parts, of the same dtypes and numbers of dims."""
    seen = [
        (view.operation, [(path, part.kind, len(part.shape or ())) for path, part in view.parts.items()])
        for view in failure.views
    ]
    return bool(seen) and all(other == seen[0] for other in seen)


def drop_duplicates(gathered: Any, tally: Tally) -> Any:
    """Keep the rows of a gathered nest of tensors that are there for the first time.

    Args:
        gathered: Tensors that hold the same number of rows of every rank, rank 0 first.
        tally: What each rank holds.
    """
    return recursively_apply(functools.partial(_keep_real, tally=tally), gathered)


def _keep_real(tensor: torch.Tensor, tally: Tally) -> torch.Tensor:
    """Keep of each rank's rows those of real samples; a sample may have several rows."""
    ranks = len(tally.rows)
    each = tensor.shape[0] // ranks
    kept = [_real_rows(each, rows, real) for rows, real in zip(tally.rows, tally.real, strict=True)]
    if all(count == each for count in kept):
        return tensor
    last = max((rank for rank in range(ranks) if kept[rank]), default=0)
    if all(count == each for count in kept[:last]):
        return tensor[: last * each + kept[last]]
    return torch.cat([tensor[rank * each : rank * each + kept[rank]] for rank in range(ranks)])


def _real_rows(each: int, rows: int, real: int) -> int:
    """Return how many of the `each` rows that came from a batch of `rows` samples, `real` of them real, to keep."""
    if rows and each % rows == 0:
        return each // rows * real
    return each if real else 0


def _merge(parts: list[Any], rows: Sequence[int | None], tally: Tally | None, *, as_list: bool = False) -> Any:
    """Join the parts of ranks, without repeats."""
    if tally is not None:
        trimmed: list[Any] = []
        left: list[int | None] = []
        for part, held, real in zip(parts, tally.rows, tally.real, strict=True):
            found = count_rows(part, held)
            keep = real if found is None else _real_rows(found, held, real)
            if keep or (not trimmed and real):
                trimmed.append(part if found is None or keep == found else take_rows(part, slice(0, keep), found))
                left.append(None if found is None else keep)
        parts, rows = trimmed or [take_rows(parts[0], slice(0, 0), rows[0])], left or [0]
    if as_list and (isinstance(parts[0], list | tuple) or (isinstance(parts[0], torch.Tensor) and parts[0].dim())):
        return [item for part in parts for item in part]
    return join_rows(parts, rows)


def _all_tensors(value: Any) -> bool:
    """Tell whether `gather` can take a nest: tensors alone, at least one."""
    if not holds_tensor(value):
        return False
    leaves: list[bool] = []

    def note(leaf: Any) -> Any:
        leaves.append(isinstance(leaf, torch.Tensor))
        return leaf

    recursively_apply(note, value, test_type=_any_leaf)
    return all(leaves)


def _any_leaf(leaf: Any) -> bool:
    del leaf
    return True


def _to_host(value: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.detach().cpu(), value)


def _to_device(value: Any, like: Any) -> Any:
    """Move gathered tensors to where this rank's were."""
    devices: list[torch.device] = []
    recursively_apply(lambda tensor: devices.append(tensor.device) or tensor, like)  # type: ignore[func-returns-value]
    return value if not devices or devices[0].type == "cpu" else send_to_device(value, devices[0])


def _swap_among(value: Any, members: tuple[int, ...], here: World) -> list[Any]:
    """Exchange objects between some ranks; the others need not come here."""
    if here.rank not in members or len(members) == 1:
        return [value]
    wire = torch.device("cpu") if "gloo" in str(here.backend) else here.device
    others = [rank for rank in members if rank != here.rank]
    mine = torch.frombuffer(bytearray(pickle.dumps(_to_host(value))), dtype=torch.uint8).to(wire)
    lengths = {rank: torch.zeros(1, dtype=torch.int64, device=wire) for rank in others}
    _trade(torch.tensor([mine.numel()], device=wire), lengths)
    contents = {rank: torch.empty(int(length), dtype=torch.uint8, device=wire) for rank, length in lengths.items()}
    _trade(mine, contents)
    return [value if rank == here.rank else pickle.loads(bytes_of(contents[rank])) for rank in members]


def _trade(mine: torch.Tensor, theirs: dict[int, torch.Tensor]) -> None:
    """Send one tensor to some ranks, and receive one of each."""
    moves = [dist.P2POp(dist.isend, mine, rank) for rank in theirs]
    moves += [dist.P2POp(dist.irecv, received, rank) for rank, received in theirs.items()]
    for move in dist.batch_isend_irecv(moves):
        move.wait()
