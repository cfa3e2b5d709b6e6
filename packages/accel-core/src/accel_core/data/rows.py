"""The rows of a batch, whatever it is made of: counting, taking and joining them.

A batch is a nest of tensors or numpy arrays whose first dim counts samples, a list with one item a sample (strings,
dicts, tensors of different shapes), or a mapping, tuple or list of such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_core.comm.tree import honor_mapping, honor_type, is_namedtuple, recursively_apply, tree_leaves


def is_array(value: object) -> bool:
    """Return whether a value is a tensor or a numpy array."""
    if isinstance(value, torch.Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_nest(value: Sequence[Any], rows: int | None) -> bool:
    """Return whether a list or tuple is a nest of columns; otherwise it holds one item a sample."""
    if is_namedtuple(value):
        return True
    if not any(map(is_array, tree_leaves(value))):
        return False
    counts = [count_rows(item, rows) for item in value]
    if rows is None:
        return all(count is not None or is_array(item) for count, item in zip(counts, value, strict=True))
    return all(count == rows or (is_array(item) and item.ndim == 0) for count, item in zip(counts, value, strict=True))


def count_rows(batch: object, rows: int | None = None) -> int | None:
    """Return the number of samples in a batch, or `None` where it does not tell."""
    if is_array(batch):
        array: Any = batch
        return int(array.shape[0]) if array.ndim else None
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
    """Return the number of samples in a batch that may be shorter than the others of its loader."""
    if full is None:
        return count_rows(batch)
    if count_rows(like, full) != full:
        # No full batch was seen: tensors with equally many rows are columns, as torch's default collation makes them.
        columns = count_rows(batch)
        return columns if columns is not None and count_rows(batch, columns) == columns else count_rows(batch, full)
    # A short list of tensors may hold columns or one tensor a sample; what the lists of a full batch hold tells which.
    return _count_as(batch, like, full)


def outline(batch: object) -> Any:
    """Return a batch whose tensors have shapes but no memory, as `count_rows_like` needs the first one."""
    return recursively_apply(lambda leaf: torch.empty(tuple(leaf.shape), device="meta"), batch, test_type=is_array)


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
    """Take a slice of the samples of a batch."""
    if is_array(batch):
        array: Any = batch
        return array[wanted] if array.ndim else array
    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: take_rows(value, wanted, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if is_nest(batch, rows):
            return honor_type(batch, (take_rows(item, wanted, rows) for item in batch))
        return batch[wanted]
    return batch


def join_rows(batches: Sequence[Any], rows: Sequence[int | None]) -> Any:
    """Lay the samples of several batches of one structure after each other."""
    first = batches[0]
    if all(map(is_array, batches)):
        return _join_arrays(batches)
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: join_rows([batch[key] for batch in batches], rows) for key in first})
    if isinstance(first, list | tuple):
        if all(is_nest(batch, count) for batch, count in zip(batches, rows, strict=True)):
            columns = (join_rows([batch[place] for batch in batches], rows) for place in range(len(first)))
            return honor_type(first, columns)
        joined = [item for batch in batches for item in batch]
        return joined if isinstance(first, list) else tuple(joined)
    return first if all(_equal(batch, first) for batch in batches) else list(batches)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; some, as tables or objects with tensors, say neither yes nor no."""
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _join_arrays(arrays: Sequence[Any]) -> object:
    arrays = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
    kept = [array for array in arrays if array.shape[0]] or list(arrays[:1])  # empty ones do not decide shape and dtype
    # What cannot be joined without a conversion stays as it is, row by row.
    if len({(type(array.dtype), array.shape[1:], array.dtype) for array in kept}) > 1:
        return [row for array in kept for row in array]
    if isinstance(kept[0], torch.Tensor):
        return torch.cat(kept)
    numpy = sys.modules["numpy"]
    masked = any(isinstance(array, numpy.ma.MaskedArray) for array in kept)  # `numpy.concatenate` drops masks
    return numpy.ma.concatenate(kept) if masked else numpy.concatenate(kept)
