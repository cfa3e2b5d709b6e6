"""Sending each rank its own object from one rank: tensors as raw bytes, the rest as a pickle."""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from accel_core.comm.transport import memory_of
from accel_core.errors import CollectiveError, RemoteRankError
from accel_core.process.world import World

__all__ = ["ScatterChannel"]

_HEADER = struct.Struct("<QQ")
"""Bytes of the pickle, and of the longest message of all ranks."""
_ALIGNMENT = 16
_FIRST_CAPACITY = 16 * 1024


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Pickle an object with its dense tensors left out."""

    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.size = 0

    def persistent_id(self, obj: object) -> tuple[str, tuple[int, ...], int] | None:
        # Only what has plain memory is left out; everything else is part of the pickle.
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None
        start, self.size = self.size, self.size + _aligned(obj.numel() * obj.element_size())
        self.tensors.append(obj)
        return (str(obj.dtype).removeprefix("torch."), tuple(obj.shape), start)


class _Unpickler(pickle.Unpickler):
    """Build an object around tensors that lie in a buffer."""

    def __init__(self, source: io.BytesIO, tensors: torch.Tensor) -> None:
        super().__init__(source)
        self.tensors = tensors

    def persistent_load(self, pid: tuple[str, tuple[int, ...], int]) -> torch.Tensor:
        name, shape, start = pid
        dtype = getattr(torch, name)
        nbytes = math.prod(shape) * dtype.itemsize
        return self.tensors[start : start + nbytes].view(dtype).view(shape)


class _Failed:
    """What rank 0 sends when it has nothing else to send."""

    def __init__(self, text: str) -> None:
        # Text and not the error itself: one of the user's own classes need not survive a pickle.
        self.text = text


class ScatterChannel:
    """One-way channel from rank 0 to every rank.

    A message goes in one collective once the size of messages is known: each rank receives as many bytes as the
    longest message so far had; what is longer follows in a second collective, and raises that number.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        on_host = world.backend is None or "gloo" in world.backend or "mpi" in world.backend
        self._device = torch.device("cpu") if on_host else world.device
        self._capacity = _FIRST_CAPACITY

    def send(self, messages: list[Any]) -> object:
        """Send one object to each rank; on rank 0 only.

        Raises:
            CollectiveError: An object cannot be pickled; the others get RemoteRankError.
        """
        if self._world.size == 1:
            return messages[0]
        try:
            # By identity: ranks that read the same part are sent one object.
            packed = {key: self._pack(message) for key, message in {id(each): each for each in messages}.items()}
        except Exception as failure:
            self.fail(failure)
            raise
        buffers = [packed[id(message)] for message in messages]
        longest = max(buffer.numel() for buffer in buffers)
        for buffer in packed.values():
            _HEADER.pack_into(memory_of(buffer), 0, _HEADER.unpack_from(memory_of(buffer))[0], longest)
        capacity = self._capacity
        self._scatter([_sized(buffer[:capacity], capacity) for buffer in buffers], capacity)
        if longest > capacity:
            rest = longest - capacity
            self._scatter([_sized(buffer[capacity:], rest) for buffer in buffers], rest)
            self._capacity = longest
        return messages[0]

    def fail(self, failure: Exception) -> None:
        """Tell the others why they get nothing: without a message they would wait until the group's timeout."""
        self.send([None] + [_Failed(repr(failure))] * (self._world.size - 1))

    def receive(self) -> Any:
        """Return the object that rank 0 sent to this rank.

        Raises:
            RemoteRankError: Rank 0 failed.
        """
        capacity = self._capacity
        buffer = self._scatter(None, capacity)
        pickled, longest = _HEADER.unpack(memory_of(buffer[: _HEADER.size].cpu()))
        if longest > capacity:
            buffer = torch.cat([buffer, self._scatter(None, longest - capacity)])
            self._capacity = longest
        start = _aligned(_HEADER.size)
        content = memory_of(buffer[start : start + pickled].cpu())
        message = _Unpickler(io.BytesIO(content), buffer[_aligned(start + pickled) :]).load()
        if isinstance(message, _Failed):
            raise RemoteRankError(
                f"Rank 0 could not read the data that it reads for all ranks; got {message.text}. Fix the error; its "
                "traceback is in the output of rank 0."
            )
        return message

    def _pack(self, message: object) -> torch.Tensor:
        target = io.BytesIO()
        pickler = _Pickler(target)
        try:
            pickler.dump(message)
        except Exception as failure:
            raise CollectiveError(
                "Batches that rank 0 reads for all ranks have to be picklable; got one with "
                f"{type(failure).__name__}: {failure}. Let the dataset and collate_fn give data alone, or use "
                "dispatch_batches=False."
            ) from failure
        content = target.getbuffer()
        start = _aligned(_HEADER.size)
        tensors = _aligned(start + len(content))
        buffer = torch.zeros(tensors + pickler.size, dtype=torch.uint8, device="cpu")
        memory = memory_of(buffer)
        _HEADER.pack_into(memory, 0, len(content), 0)
        memory[start : start + len(content)] = content
        for tensor in pickler.tensors:
            raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            buffer[tensors : tensors + raw.numel()] = raw
            tensors += _aligned(raw.numel())
        return buffer

    def _scatter(self, buffers: list[torch.Tensor] | None, size: int) -> torch.Tensor:
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.scatter(received, None if buffers is None else [each.to(self._device) for each in buffers], src=0)
        return received


def _sized(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if buffer.numel() == size else pad(buffer, (0, size - buffer.numel()))
