"""Each rank's part of an input that all ranks hold."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from accel_core.comm.tree import honor_mapping, key_text
from accel_core.errors import DataError, UnsupportedTypeError

__all__ = ["split_for_rank"]


def split_for_rank(inputs: Any, rank: int, size: int, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous part of `inputs`.

    The parts differ by one element at most; the first ranks hold the longer ones.

    Raises:
        DataError: The values of a dict have different lengths.
        UnsupportedTypeError: A value of a dict has no length.
    """
    if size == 1:
        return inputs
    if isinstance(inputs, dict):
        lengths = {key: _length(key, value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"All values of a dict that is split between processes need the same length; got {lengths}. "
                "Give values of one length."
            )
        parts = {key: split_for_rank(value, rank, size, apply_padding=apply_padding) for key, value in inputs.items()}
        return honor_mapping(inputs, parts)
    numpy = sys.modules.get("numpy")  # an array comes only from a NumPy that is loaded
    if numpy is not None and isinstance(inputs, numpy.ndarray) and inputs.ndim:
        return inputs[_indices(len(inputs), rank, size, apply_padding)]
    if not isinstance(inputs, list | tuple | torch.Tensor | Dataset) and not hasattr(inputs, "select"):
        return inputs
    indices = _indices(len(inputs), rank, size, apply_padding)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.as_tensor(indices, dtype=torch.long, device=inputs.device)]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    part = [inputs[index] for index in indices]
    return part if isinstance(inputs, list) else tuple(part)


def _length(key: object, value: Any) -> int:
    try:
        return len(value)
    except TypeError as failure:
        raise UnsupportedTypeError(
            "A dict that is split between processes holds values that have one length; got "
            f"{type(value).__name__} at {key_text(key)}. Take what all processes share out of the dict."
        ) from failure


def _indices(length: int, rank: int, size: int, apply_padding: bool) -> list[int]:
    share, longer = divmod(length, size)
    start = rank * share + min(rank, longer)
    indices = list(range(start, start + share + (rank < longer)))
    if apply_padding and length:
        widest = share + (longer > 0)
        indices += [indices[-1] if indices else length - 1] * (widest - len(indices))
    return indices
