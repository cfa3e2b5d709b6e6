"""Gathering what was computed from batches, each sample once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.comm.batch import find_device, send_to_device
from accel_core.comm.collectives import gather
from accel_core.comm.control import Channel
from accel_core.comm.objects import check_items
from accel_core.comm.tree import recursively_apply, tree_leaves
from accel_core.data.base import LoaderBase
from accel_core.data.rows import count_rows, is_array, join_rows, take_rows
from accel_core.data.shard import StepCounts
from accel_core.errors import DataError, RankDisagreementError, expect
from accel_core.process.world import World, ensure

if TYPE_CHECKING:
    from accel_core.state.gradient import GradientState


def gather_for_metrics(
    input_data: object,
    gradient_state: GradientState,
    use_gather_object: bool = False,
    *,
    gather: Callable[[Any], Any] = gather,
) -> Any:
    """Gather what all ranks computed from their current batches, without what is there twice.

    The loader being read tells which samples of the step are repeats that fill up the last global batch, and which
    ranks of one replica read the same samples: their rows are dropped. Rows come in the order of the sampler. Where
    ranks have no batch in the last step (`even_batches=False`), those that have one gather among themselves.

    Raises:
        CollectiveError: An object cannot be pickled.
        DataError: Ranks hold parts of samples.
        RemoteRankError: Another rank failed.
        UnsupportedTypeError: Objects are not in a list, in which they have an order.
    """
    single = not hasattr(use_gather_object, "__len__")
    expect(single, use_gather_object, "gather_for_metrics takes one nest", "Write gather_for_metrics((first, second)).")
    world = ensure()
    active = gradient_state.active_dataloader
    loader = active if isinstance(active, LoaderBase) else None
    _refuse_cut(input_data, loader)
    if world.size == 1:
        whole = gather(input_data) if not use_gather_object and _all_tensors(input_data) else input_data
        return _cut_to_last_batch(whole, loader)
    counts, order = _counts_of_ranks(loader, world)
    channel = Channel(world, "gather_for_metrics")
    if counts is not None and len(counts.readers) < world.size:
        members = [rank for rank in order if counts.rows[rank]]
        parts = channel.exchange_among(_to_host(input_data), members)
        return _to_device(_merge(parts, _chosen(counts, members)), input_data)
    if not use_gather_object and _all_tensors(input_data) and not _may_be_samples(input_data, counts, loader):
        try:
            gathered = gather(input_data)
        except RankDisagreementError as failure:
            if not _only_sizes_differ(failure):
                raise
        else:
            return gathered if counts is None else drop_duplicates(gathered, counts, order)
    parts = channel.exchange(_to_host(input_data), _check_rows)
    held = [_part_size(loader)] * world.size if counts is None else _chosen(counts, order)
    merged = _merge([parts[rank] for rank in order], held, as_list=use_gather_object)
    return _to_device(merged, input_data)


def _refuse_cut(value: object, loader: LoaderBase | None) -> None:
    """Refuse rows of samples that are cut over ranks: one rank's part of them would count for all."""
    if loader is None or not loader.settings.cut:
        return
    if any(not isinstance(leaf, torch.Tensor) or leaf.dim() for leaf in tree_leaves(value)):
        raise DataError(
            "Metrics count whole samples; got rows while a loader is read whose samples are cut over ranks. Evaluate "
            "with a loader that is prepared by itself, without the model, or use gather."
        )


def _check_rows(value: object) -> None:
    """Refuse objects that are not in a list, of which nothing says how many samples they belong to."""
    if count_rows(value) is None and not any(map(is_array, tree_leaves(value))):
        check_items(value)


_Held = Sequence["int | tuple[int, int] | None"]
"""For each part: its rows and how many of them are real, its rows alone where all are real, or `None`."""


def _chosen(counts: StepCounts, ranks: Sequence[int]) -> list[int | tuple[int, int] | None]:
    return [(counts.rows[rank], counts.real[rank]) for rank in ranks]


def _counts_of_ranks(loader: LoaderBase | None, world: World) -> tuple[StepCounts | None, list[int]]:
    """Return what each rank of the world holds, and the ranks in the order of their samples."""
    counts, parts = (None, tuple(range(world.size))) if loader is None else (loader.counts, loader.parts)
    order = sorted(range(world.size), key=parts.__getitem__)
    readers = max(parts) + 1
    if len(parts) != world.size or (counts is not None and len(counts.rows) != readers):
        return None, list(range(world.size))
    if readers == world.size:
        if counts is not None and order != list(range(world.size)):
            counts = counts.over(parts)
        return counts, order
    if counts is None:
        size = _part_size(loader) or 1
        counts = StepCounts((size,) * readers, (size,) * readers)
    return counts.over(parts), order


def _part_size(loader: LoaderBase | None) -> int | None:
    """Return how many samples a rank holds in a full step, where that is fixed."""
    size = None if loader is None else loader.spec.step_samples
    return None if loader is None or size is None else size // loader.spec.ranks


def _cut_to_last_batch(value: object, loader: LoaderBase | None) -> object:
    """Cut tensors that have a row for each place of a full batch to the samples that the last batch holds."""
    full = None if loader is None else loader.spec.batch_size
    if loader is None or full is None:
        return value
    counts = loader.counts
    held = counts.total if counts is not None else loader.remainder if loader.end_of_dataloader else 0
    if not 0 < held < full:
        return value
    return recursively_apply(lambda leaf: leaf[:held] if leaf.ndim and len(leaf) == full else leaf, value)


def _only_sizes_differ(failure: RankDisagreementError) -> bool:
    """Return whether all ranks gathered the same parts, of the same dtypes and numbers of dims."""
    seen = [
        (view.operation, [(path, part.kind, len(part.shape or ())) for path, part in view.parts.items()])
        for view in failure.views
    ]
    return bool(seen) and all(other == seen[0] for other in seen)


def _may_be_samples(value: object, counts: StepCounts | None, loader: LoaderBase | None) -> bool:
    """Return whether a nest holds a list that has as many tensors as some rank has samples."""
    # Such a list may hold columns, or one tensor a sample (boxes of an image); no rank can tell by itself. All ranks
    # decide alike: lists of columns are equally long everywhere, and a list of samples has a length that is in the
    # counts.
    if isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
        sizes = {_part_size(loader)} if counts is None else set(counts.rows)
        return not value or len(value) in sizes
    if isinstance(value, Mapping):
        return any(_may_be_samples(item, counts, loader) for item in value.values())
    return isinstance(value, list | tuple) and any(_may_be_samples(item, counts, loader) for item in value)


def drop_duplicates(gathered: object, counts: StepCounts, order: Sequence[int] | None = None) -> Any:
    """Keep the rows of a gathered nest of tensors that occur for the first time."""
    keep = functools.partial(_keep_real, counts=counts, order=order or range(len(counts.rows)))
    return recursively_apply(keep, gathered)


def _keep_real(tensor: torch.Tensor, counts: StepCounts, order: Sequence[int]) -> torch.Tensor:
    """Keep of each rank's rows those of real samples; a sample may have several rows."""
    ranks = len(counts.rows)
    each = tensor.shape[0] // ranks
    kept = [_real_rows(each, rows, real) for rows, real in zip(counts.rows, counts.real, strict=True)]
    if all(count == each for count in kept) and list(order) == list(range(ranks)):
        return tensor
    return torch.cat([tensor[rank * each : rank * each + kept[rank]] for rank in order])


def _real_rows(each: int, rows: int, real: int) -> int:
    """Return how many of the `each` rows that came from a batch of `rows` samples, `real` of them real, to keep."""
    if rows and each % rows == 0:
        return each // rows * real
    return each if real else 0


def _merge(parts: list[Any], held: _Held, *, as_list: bool = False) -> object:
    """Join the parts of ranks, without repeats."""
    trimmed: list[Any] = []
    left: list[int | None] = []
    for part, size in zip(parts, held, strict=True):
        if not isinstance(size, tuple):
            trimmed.append(part)
            left.append(size)
            continue
        rows, real = size
        found = count_rows(part, rows)
        keep = real if found is None else _real_rows(found, rows, real)
        if keep:
            trimmed.append(part if found is None or keep == found else take_rows(part, slice(0, keep), found))
            left.append(None if found is None else keep)
    if not trimmed:
        known = held[0][0] if isinstance(held[0], tuple) else held[0]
        trimmed, left = [take_rows(parts[0], slice(0, 0), known)], [0]
    if as_list and (isinstance(trimmed[0], list | tuple) or (is_array(trimmed[0]) and trimmed[0].ndim)):
        return [item for part in trimmed for item in part]
    return join_rows(trimmed, left)


def _all_tensors(value: object) -> bool:
    """Return whether `gather` can take a nest: tensors alone, at least one."""
    leaves = list(tree_leaves(value))
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _to_host(value: object) -> object:
    return recursively_apply(lambda tensor: tensor.detach().cpu(), value)


def _to_device(value: object, like: object) -> object:
    """Move gathered tensors to where this rank's were."""
    device = find_device(like)
    return value if device is None or device.type == "cpu" else send_to_device(value, device)
