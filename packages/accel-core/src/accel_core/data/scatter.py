"""Sending each rank its own object from one rank: tensors as raw bytes, the rest as a pickle."""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist

from accel_core.errors import CollectiveError, RemoteRankError
from accel_core.process.world import World

__all__ = ["ScatterChannel", "bytes_of"]

_HEADER = struct.Struct("<QQQ")
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
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype, device=self.tensors.device)
        return self.tensors[start : start + count * dtype.itemsize].view(dtype).view(shape)


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
        packed: dict[int, torch.Tensor] = {}  # by identity: ranks that read the same part are sent one object
        try:
            for message in messages:
                if id(message) not in packed:
                    packed[id(message)] = self._pack(message)
        except Exception as failure:
            self.fail(failure)
            raise
        buffers = [packed[id(message)] for message in messages]
        longest = max(buffer.numel() for buffer in buffers)
        for buffer in packed.values():
            pickled, total = struct.unpack("<QQ", bytes_of(buffer[:16]))
            head = torch.frombuffer(bytearray(_HEADER.pack(pickled, total, longest)), dtype=torch.uint8)
            buffer[: _HEADER.size] = head
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
        pickled, _, longest = _HEADER.unpack(bytes_of(buffer[: _HEADER.size]))
        if longest > capacity:
            buffer = torch.cat([buffer, self._scatter(None, longest - capacity)])
            self._capacity = longest
        start = _aligned(_HEADER.size)
        content = bytes_of(buffer[start : start + pickled])
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
        buffer[:16] = torch.frombuffer(bytearray(struct.pack("<QQ", len(content), buffer.numel())), dtype=torch.uint8)
        buffer[start : start + len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        for tensor in pickler.tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                buffer[tensors : tensors + nbytes] = raw
            tensors += _aligned(nbytes)
        return buffer

    def _scatter(self, buffers: list[torch.Tensor] | None, size: int) -> torch.Tensor:
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.scatter(received, None if buffers is None else [each.to(self._device) for each in buffers], src=0)
        return received


def bytes_of(buffer: torch.Tensor) -> bytes:
    """Return the bytes of a uint8 tensor, on whichever device it is."""
    held = buffer.cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.numel())


def _sized(buffer: torch.Tensor, size: int) -> torch.Tensor:
    if buffer.numel() == size:
        return buffer.contiguous()
    full = torch.zeros(size, dtype=torch.uint8, device="cpu")
    full[: buffer.numel()] = buffer
    return full
