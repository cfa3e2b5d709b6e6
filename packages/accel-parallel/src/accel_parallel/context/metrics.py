"""What ranks that share a sequence computed from their parts of it, as values of whole samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from accel_core.comm.tree import recursively_apply, tree_leaves
from accel_core.errors import DataError

_T = TypeVar("_T")
_TOLERANCE = 1e-5  # ranks may add up in another order


class _Leaf(NamedTuple):
    """What a rank says of one value."""

    kind: str  # its type, with the shape and format of a tensor
    content: float = 0.0  # a number that other values, or the same in another order, make another
    size: float = 0.0  # the sum of all magnitudes
    loss: float | None = None  # the number that it is, in each of its rows; `None` of anything but a loss


def of_whole_samples(value: _T, group: dist.ProcessGroup) -> _T:
    """Return values as those of whole samples: a loss that differs among ranks becomes the mean of theirs.

    A loss is one number, or a row of equal ones, as libraries repeat it for each sample. `Accelerator.backward` takes
    it as a mean over ranks too.

    Raises:
        DataError: Other values differ, on all ranks.
    """
    leaves = list(tree_leaves(value))
    own = [_leaf(each) for each in leaves]
    everywhere: list[list[_Leaf]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everywhere, own, group=group)
    if any(len(each) != len(own) for each in everywhere):
        return value  # whoever gathers names what differs
    means: dict[int, float] = {}
    for leaf, ranks in zip(leaves, zip(*everywhere, strict=True), strict=True):
        if _same_structure(ranks):
            continue
        losses = [each.loss for each in ranks if each.loss is not None]
        if len(losses) < len(ranks):
            raise DataError(
                "Metrics count whole samples; got values that differ between ranks that share a sequence: "
                f"{' and '.join(dict.fromkeys(each.kind for each in ranks))}. Compute them from the whole sequence, "
                "reduce them to one number with accelerator.reduce, or use gather."
            )
        means[id(leaf)] = sum(losses) / len(losses)
    if not means:
        return value
    averaged: _T = recursively_apply(
        lambda leaf: torch.full_like(leaf, means[id(leaf)]) if id(leaf) in means else leaf, value
    )
    return averaged


@torch.no_grad()
def _leaf(value: object) -> _Leaf:
    """Return what there is to compare of a value; of objects of other kinds, nothing but their type."""
    if isinstance(value, str):
        return _Leaf("str", float(zlib.crc32(value.encode())))  # every rank sends a number, not its texts
    if isinstance(value, bool | int | float):
        return _Leaf(type(value).__name__, float(value), abs(float(value)))
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return _Leaf(type(value).__name__)
    numbers = torch.nan_to_num(value.detach().flatten().float())
    # Weighted by position, or other orders would have the same sum.
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device).cos()
    # In float64, where a sum of the largest float32 numbers, which stand for infinities too, is finite.
    sums = [each.sum(dtype=torch.float64) for each in (numbers * weights, numbers.abs())]
    content, size = torch.stack(sums).tolist()
    kind = f"a tensor of shape {tuple(value.shape)} in {value.dtype}"
    return _Leaf(kind, content, size, _loss(value))


def _loss(value: torch.Tensor) -> float | None:
    """Return the number that a loss is, alone or in each row; `None` of another tensor."""
    if not value.is_floating_point() or value.dim() > 1 or not value.numel():
        return None
    first = value.reshape(-1)[:1]
    return float(first) if value.dim() == 0 or bool((value == first).all()) else None


def _same_structure(ranks: Sequence[_Leaf]) -> bool:
    first = ranks[0]
    limit = _TOLERANCE * first.size
    return all(
        each.kind == first.kind and abs(each.content - first.content) <= limit and abs(each.size - first.size) <= limit
        for each in ranks
    )
