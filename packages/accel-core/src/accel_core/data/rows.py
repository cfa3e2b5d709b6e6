"""The rows of a batch, whatever it is made of: counting, taking and joining them.

A batch is a nest of tensors whose first dim counts samples, a list with one item a sample (strings, dicts, tensors of
different shapes), or a mapping, tuple or list of such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_core.comm.tree import honor_mapping, honor_type, is_namedtuple, recursively_apply, tree_leaves

__all__ = ["count_rows", "count_rows_like", "is_nest", "join_rows", "outline", "take_rows"]


def is_nest(value: Sequence[Any], rows: int | None) -> bool:
    """Return whether a list or tuple is a nest of columns; otherwise it holds one item a sample.

    Args:
        value: The list or tuple.
        rows: Number of samples, where known.
    """
    if is_namedtuple(value):
        return True
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
        return False
    counts = [count_rows(item, rows) for item in value]
    if rows is None:
        return all(
            count is not None or isinstance(item, torch.Tensor) for count, item in zip(counts, value, strict=True)
        )
    return all(
        count == rows or (isinstance(item, torch.Tensor) and item.dim() == 0)
        for count, item in zip(counts, value, strict=True)
    )


def count_rows(batch: object, rows: int | None = None) -> int | None:
    """Return the number of samples in a batch, or `None` where it does not tell.

    Args:
        batch: The batch.
        rows: The number expected; it decides what a list means that could be read in two ways.
    """
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    if isinstance(batch, Mapping):
        children: Sequence[Any] = list(batch.values())
    elif isinstance(batch, list | tuple):
        if not is_nest(batch, rows):
            return len(batch)
        children = batch
    else:
        return None
    counts = (count_rows(item, rows) for item in children)
    return next((count for count in counts if count is not None), None)


def count_rows_like(batch: object, like: object, full: int | None) -> int | None:
    """Return the number of samples in a batch that may be shorter than the others of its loader.

    A short list of tensors may hold columns or one tensor a sample; what the lists of a full batch hold tells which.

    Args:
        batch: The batch.
        like: The loader's first batch, or its outline.
        full: Number of samples in a full batch, where that is fixed.
    """
    if full is None:
        return count_rows(batch)
    if count_rows(like, full) != full:
        # No full batch was seen: tensors with equally many rows are columns, as torch's default collation makes them.
        columns = count_rows(batch)
        return columns if columns is not None and count_rows(batch, columns) == columns else count_rows(batch, full)
    return _count_as(batch, like, full)


def outline(batch: object) -> Any:
    """Return a batch whose tensors have shapes but no memory, as `count_rows_like` needs the first one.

    Args:
        batch: A batch of tensors in any nest.
    """
    return recursively_apply(lambda tensor: torch.empty(tensor.shape, device="meta"), batch)


def _count_as(batch: object, like: object, full: int) -> int | None:
    """Count with each list read as the list in the same place of a full batch is."""
    if isinstance(batch, Mapping) and isinstance(like, Mapping) and batch.keys() == like.keys():
        pairs = [(batch[key], like[key]) for key in batch]
    elif isinstance(batch, list | tuple) and isinstance(like, list | tuple):
        if not is_nest(like, full):
            return len(batch)
        pairs = list(zip(batch, like, strict=False))
    else:
        return count_rows(batch, full)
    counts = (_count_as(item, other, full) for item, other in pairs)
    return next((count for count in counts if count is not None), None)


def take_rows(batch: object, wanted: slice, rows: int | None) -> Any:
    """Take a slice of the samples of a batch.

    Args:
        batch: The batch. Values that do not count samples stay whole.
        wanted: The samples to take.
        rows: Number of samples in the batch.

    Returns:
        The same nest with the selected samples.
    """
    if isinstance(batch, torch.Tensor):
        return batch[wanted] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: take_rows(value, wanted, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if is_nest(batch, rows):
            return honor_type(batch, (take_rows(item, wanted, rows) for item in batch))
        return batch[wanted]
    return batch


def join_rows(batches: Sequence[Any], rows: Sequence[int | None]) -> Any:
    """Lay the samples of several batches of one structure behind one another.

    Args:
        batches: The batches.
        rows: Number of samples in each.

    Returns:
        One batch. Tensors whose shapes differ beyond the first dim become a list with one tensor a sample; values that
        are neither tensors nor lists become a list with one value a batch, unless all are equal.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return _join_tensors(batches)
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: join_rows([batch[key] for batch in batches], rows) for key in first})
    if isinstance(first, list | tuple):
        if all(is_nest(batch, count) for batch, count in zip(batches, rows, strict=True)):
            columns = (join_rows([batch[place] for batch in batches], rows) for place in range(len(first)))
            return honor_type(first, columns)
        joined = [item for batch in batches for item in batch]
        return joined if isinstance(first, list) else tuple(joined)
    return first if all(batch == first for batch in batches) else list(batches)


def _join_tensors(tensors: Sequence[torch.Tensor]) -> object:
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    kept = [tensor for tensor in tensors if tensor.shape[0]] or list(tensors[:1])
    if len({(tensor.shape[1:], tensor.dtype) for tensor in kept}) == 1:
        return torch.cat(kept)
    return [row for tensor in kept for row in tensor]
