"""What Accelerate does with nests of tensors, and accel itself does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel_core._records import record
from accel_core.comm import collectives
from accel_core.comm.batch import find_batch_size
from accel_core.comm.transport import Message, participate
from accel_core.comm.tree import recursively_apply
from accel_core.errors import CollectiveError, DataError, UnsupportedTypeError
from accel_core.process.world import World, ensure

TENSOR_TYPE_TO_INT = {
    torch.float32: 1,  # the numbers are Accelerate's
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
"""A number for each dtype, the same in every process."""


TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}
"""The dtype of each number."""


@record
class TensorInformation:
    """What a tensor is made of, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def ignorant_find_batch_size(data: object) -> int | None:
    """Return what `find_batch_size` returns, or `None` where it finds none."""
    try:
        return find_batch_size(data)
    except (DataError, UnsupportedTypeError):
        return None


def get_shape(data: object) -> object:
    """Return a nest with each tensor's shape, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: object) -> object:
    """Return a nest with a `TensorInformation` in the place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_torch_xpu_tensor(tensor: object) -> bool:
    """Return whether `tensor` is a `torch.Tensor` that lives on an Intel XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def initialize_tensors(data_structure: object) -> Any:
    """Return a nest with an uninitialized tensor, on the CPU, in the place of each `TensorInformation`."""
    return recursively_apply(
        lambda information: torch.empty(information.shape, dtype=information.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


@contextmanager
def GatheredParameters(  # noqa: N802  the name that DeepSpeed gave it
    params: object, modifier_rank: int | None = None, fwd_module: object = None, enabled: bool = True
) -> Iterator[Any]:
    """Enter a block in which parameters are whole; without an engine that shards them they always are."""
    del modifier_rank, fwd_module, enabled  # of use to an engine only
    yield params


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give every rank the tensor that some ranks hold, or the sum of theirs where several do.

    Raises:
        CollectiveError: No rank holds a tensor.
        RankDisagreementError: Several ranks hold one, of different shapes or dtypes.
    """
    world = ensure()
    if world.size > 1:
        return _copy_to_devices(tensor, world)
    if tensor is None:
        raise CollectiveError("No rank holds a tensor to copy; got None on all. Pass the tensor on one rank at least.")
    return tensor.to(world.device)


def _copy_to_devices(tensor: torch.Tensor | None, world: World) -> torch.Tensor:
    # As text, which ranks without a tensor can send too.
    name = "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {' '.join(map(str, tensor.shape))}"
    content = name.encode()
    with participate(world, "copy_tensor_to_devices") as transport:
        held = [bytes(text).decode() for text in transport.exchange_bytes(content, Message(nbytes=len(content)))]
    if not any(held):
        raise CollectiveError("No rank holds a tensor to copy; got None on all. Pass the tensor on one rank at least.")
    if tensor is None:
        dtype, *shape = next(text for text in held if text).split()
        # Adds nothing to the sum.
        tensor = torch.zeros([int(size) for size in shape], dtype=getattr(torch, dtype), device=world.device)
    copied: torch.Tensor = collectives.reduce(tensor.to(world.device), "sum")
    return copied
