"""Tensors of different sizes across ranks: their shapes, and padding to one size."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch

from accel_core.comm.control import Channel
from accel_core.comm.packing import check_kinds
from accel_core.comm.transport import Message, digest_of, participate
from accel_core.comm.tree import flatten, unflatten, view_of
from accel_core.errors import ConfigurationError
from accel_core.process.world import World, ensure

Nest = TypeVar("Nest")


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of torch's nested kind has no size to pad to and was left as it is."""


def pad_across_processes(tensor: Nest, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Nest:
    """Pad the tensors of a nest so that all ranks have the same size along one dim, ready for `gather`.

    Args:
        tensor: A nest of tensors of the same structure and numbers of dims on all ranks.
        dim: The dim to pad. A tensor that has no such dim is left as it is.
        pad_index: The value to fill with. Where a dtype cannot hold it, the tensor is promoted on all ranks.
        pad_first: Fill in front instead of at the end.

    Returns:
        The nest with padded tensors; one that needs no padding is returned itself.

    Raises:
        ConfigurationError: No dtype holds both a tensor that is padded and `pad_index`; all ranks raise.
        RankDisagreementError: Structure or numbers of dims differ between ranks.
        UnsupportedTypeError: A leaf is not a tensor; the other ranks get RemoteRankError.

    Examples:
        >>> from accel import gather
        >>> tokens = torch.arange(3 + accelerator.process_index)  # a different length on each process
        >>> gather(pad_across_processes(tokens, pad_index=-1))  # with two: tensor([0, 1, 2, -1, 0, 1, 2, 3])
        tensor([0, 1, 2])
    """
    world = ensure()
    if world.size == 1:
        for leaf in flatten(tensor, "pad_across_processes")[0]:
            _warn_of_nested(leaf)
        return tensor
    return _pad_across(tensor, dim, pad_index, pad_first, world)


def _warn_of_nested(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        warnings.warn(
            "A nested tensor has no single size to pad to; it was left as it is. "
            "Call .to_padded_tensor(value) on it before padding.",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
    return tensor


def _pad_across(nest: Nest, dim: int, pad_index: float, pad_first: bool, world: World) -> Nest:
    with participate(world, f"pad_across_processes(dim={dim})") as transport:
        leaves, spec = flatten(nest, "pad_across_processes")
        check_kinds(nest, "pad_across_processes", allow_nested=True)
        for leaf in leaves:
            _warn_of_nested(leaf)
        dims = [0 if leaf.is_nested else leaf.dim() for leaf in leaves]
        sizes = [leaf.shape[dim] if -rank <= dim < rank else 0 for leaf, rank in zip(leaves, dims, strict=True)]
        content = b"".join(size.to_bytes(8, "little") for size in sizes)
        message = Message(digest_of(f"{spec!r}{dims}"), len(content), lambda: view_of(nest))
        everywhere = transport.exchange_bytes(content, message)
    padded = []
    for place, leaf in enumerate(leaves):
        lengths = [int.from_bytes(text[place * 8 : place * 8 + 8], "little") for text in everywhere]
        padded.append(_pad(leaf, dim, max(lengths), min(lengths), pad_index, pad_first) if max(lengths) else leaf)
    found: Nest = unflatten(nest, iter(padded))
    return found


def _pad(leaf: torch.Tensor, dim: int, longest: int, shortest: int, value: float, in_front: bool) -> torch.Tensor:
    """Pad one tensor to `longest` along `dim`; a dtype that cannot hold `value` is promoted wherever any rank pads."""
    if longest == shortest:
        return leaf
    dtype = _dtype_for(leaf, value)
    missing = longest - leaf.shape[dim]
    if not missing:
        return leaf.to(dtype)
    shape = list(leaf.shape)
    shape[dim] = missing
    filling = torch.full(shape, value, dtype=dtype, device=leaf.device)
    return torch.cat([filling, leaf.to(dtype)] if in_front else [leaf.to(dtype), filling], dim=dim)


def _dtype_for(leaf: torch.Tensor, value: float) -> torch.dtype:
    """Return the dtype that holds a tensor and a value: its own, else what torch promotes both to, else int64."""
    candidates: list[torch.dtype] = [leaf.dtype, torch.result_type(leaf, value)]
    if leaf.dtype is not torch.uint64:  # the upper half of which int64 does not hold
        candidates.append(torch.int64)
    for dtype in candidates:
        if _holds(dtype, value):
            return dtype
    raise ConfigurationError(
        f"No dtype holds a tensor and the value to pad it with; got {leaf.dtype} and pad_index={value!r}. Pass a value "
        "that the tensor's dtype holds."
    )


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max


def gather_tensor_shape(tensor: torch.Tensor) -> list[torch.Size]:
    """Return the shape that each rank's tensor has, by rank; the numbers of dims may differ."""
    return [torch.Size(sizes) for sizes in Channel(ensure(), "gather_tensor_shape").exchange(tuple(tensor.shape))]
