"""Each rank's part of an input that all ranks hold."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from accel_core.comm.tree import honor_mapping, key_text
from accel_core.errors import DataError, UnsupportedTypeError


def split_for_rank(inputs: Any, rank: int, size: int, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous part of `inputs`; a text is one input, which every rank gets, and so are bytes.

    The parts differ by one element at most; the first ranks hold the longer ones.

    Raises:
        DataError: The values of a mapping have different lengths.
        UnsupportedTypeError: The input, or a value of a mapping, has no length or cannot be indexed.
    """
    if size == 1 or isinstance(inputs, str | bytes):
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value, f" at {key_text(key)}") for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"All values of a dict that is split between processes need the same length; got {lengths}. "
                "Give values of one length."
            )
        parts = {key: split_for_rank(value, rank, size, apply_padding=apply_padding) for key, value in inputs.items()}
        return honor_mapping(inputs, parts)
    indices = _indices(_length(inputs), rank, size, apply_padding)
    numpy = sys.modules.get("numpy")  # an array comes only from a NumPy that is loaded
    rows = getattr(inputs, "iloc", inputs)  # a table of pandas is indexed by its columns
    if rows is not inputs or isinstance(inputs, torch.Tensor) or (numpy and isinstance(inputs, numpy.ndarray)):
        return rows[indices]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    part = [inputs[index] for index in indices]
    return tuple(part) if isinstance(inputs, tuple) else part


def _length(value: Any, place: str = "") -> int:
    with contextlib.suppress(TypeError):
        if hasattr(value, "__getitem__"):
            return len(value)
    raise UnsupportedTypeError(
        f"What is split between processes has a length and can be indexed; got {type(value).__name__}{place}. Pass a "
        "list, or leave out what all processes share."
    )


def _indices(length: int, rank: int, size: int, apply_padding: bool) -> list[int]:
    share, longer = divmod(length, size)
    start = rank * share + min(rank, longer)
    indices = list(range(start, start + share + (rank < longer)))
    if apply_padding and length:
        widest = share + (longer > 0)
        indices += [indices[-1] if indices else length - 1] * (widest - len(indices))
    return indices
