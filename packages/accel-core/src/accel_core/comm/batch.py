"""Nests of tensors in one process: size, device, slices, joins and moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from accel_core.comm.tree import is_torch_tensor, rebuild, recursively_apply, tree_leaves, tree_map
from accel_core.errors import DataError, UnsupportedTypeError

_T = TypeVar("_T")


def send_to_device(
    tensor: _T,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> _T:
    """Move a nest to a device.

    Args:
        tensor: A nest; tensors and whatever has a `to` method are moved, other leaves stay.
        device: The device, as `torch.Tensor.to` takes it.
        non_blocking: Let the copy run beside the host, where memory is pinned.
        skip_keys: Keys of mappings, at any depth, whose values stay where they are.

    Returns:
        The same nest with the moved tensors.

    Examples:
        >>> batch = {"images": torch.rand(2, 64), "names": ["a", "b"]}
        >>> batch = send_to_device(batch, accelerator.device)
        >>> batch["images"].device
        device(type='cpu')
    """
    if hasattr(tensor, "to"):
        moved: Any = tensor
        try:
            return cast("_T", moved.to(device, non_blocking=non_blocking))
        except TypeError:  # a class of somebody else may take a device alone
            return cast("_T", moved.to(device))
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if isinstance(tensor, Mapping):
        items: Any = {
            key: value if key in skipped else send_to_device(value, device, non_blocking, skipped)
            for key, value in tensor.items()
        }
    elif isinstance(tensor, tuple | list):
        items = [send_to_device(value, device, non_blocking, skipped) for value in tensor]
    else:
        return tensor
    return cast("_T", rebuild(tensor, items))


def find_batch_size(data: object) -> int:
    """Return the size of the first dim of the first tensor of a nest.

    Raises:
        DataError: A list, tuple or mapping on the way is empty.
        UnsupportedTypeError: The first leaf is not a tensor, or has no dims.
    """
    if isinstance(data, tuple | list | Mapping):
        if not data:
            raise DataError(
                f"Cannot find the batch size of something empty; got an empty {type(data)}. Pass at least one tensor."
            )
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, torch.Tensor) or data.dim() == 0:
        found = "a tensor without dims" if isinstance(data, torch.Tensor) else str(type(data))
        raise UnsupportedTypeError(
            f"The batch size is the first size of the first tensor of a batch; got {found} there. "
            "Put a tensor with a batch dim first."
        )
    return data.shape[0]


def find_device(data: object) -> torch.device | None:
    """Return the device of the first tensor of a nest, or `None` where it holds none."""
    return next((leaf.device for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: object) -> Any:
    """Return a nest with plain Python numbers, or lists of them, in the place of each tensor.

    Args:
        data: A nest of tensors.

    Returns:
        The same nest with numbers and lists.

    Examples:
        >>> listify({"loss": torch.tensor(0.5), "ids": torch.tensor([1, 2])})
        {'loss': 0.5, 'ids': [1, 2]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: _T, tensor_slice: object, process_index: int | None = None, num_processes: int | None = None
) -> _T:
    """Take the same slice of every tensor of a nest.

    Args:
        data: The nest; other leaves stay.
        tensor_slice: What stands between the brackets: `slice(0, 8)`.
        process_index: Unused; data loaders pass it to functions that slice in other ways.
        num_processes: Unused, likewise.

    Returns:
        The same nest with the slices.

    Examples:
        >>> slice_tensors({"ids": torch.arange(8), "name": "a"}, slice(0, 3))
        {'ids': tensor([0, 1, 2]), 'name': 'a'}
    """
    del process_index, num_processes
    sliced: _T = recursively_apply(lambda tensor: tensor[tensor_slice], data)
    return sliced


def concatenate(data: Sequence[_T], dim: int = 0) -> _T:
    """Join a list of nests of the same structure, tensor by tensor.

    Args:
        data: A list or tuple of nests.
        dim: The dim along which tensors are joined.

    Returns:
        One nest of the structure of the first. Of a single nest, leaves that are not tensors stay as they are.

    Raises:
        DataError: The list is empty.
        UnsupportedTypeError: A leaf is not a tensor, and there are several nests.

    Examples:
        >>> concatenate([{"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([3])}])
        {'ids': tensor([1, 2, 3])}
    """
    if isinstance(data, tuple | list) and not data:
        raise DataError(f"Nothing to concatenate; got an empty {type(data)}. Pass at least one batch.")
    joined: _T = tree_map(lambda *parts: _join(parts, dim), *data)
    return joined


def _join(parts: tuple[Any, ...], dim: int) -> object:
    if is_torch_tensor(parts[0]):
        return torch.cat(parts, dim=dim)
    if len(parts) == 1:
        return parts[0]
    raise UnsupportedTypeError(
        f"Only tensors can be concatenated; got {type(parts[0])}. Take this value out of the batches."
    )


def pad_input_tensors(tensor: _T, batch_size: int, num_processes: int, dim: int = 0) -> _T:
    """Fill a batch with zeros until it can be dealt evenly to the processes.

    Raises:
        UnsupportedTypeError: A leaf is not a tensor.
    """
    wanted = -(-batch_size // num_processes) * num_processes

    def fill(leaf: torch.Tensor) -> torch.Tensor:
        missing = wanted - leaf.shape[dim]
        if missing <= 0:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    filled: _T = recursively_apply(fill, tensor, error_on_other_type=True)
    return filled
