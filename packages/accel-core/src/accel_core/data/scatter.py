"""Sending each rank its own object from one rank: pickles in which tensors are raw bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accel_core.comm.transport import memory_of
from accel_core.errors import CollectiveError, RemoteRankError
from accel_core.process.world import World


class _Pickler(pickle.Pickler):
    """Pickles the values of dense tensors as bytes: torch's own way takes all memory of which a tensor shows a part."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return NotImplemented
        values = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _tensor, (pickle.PickleBuffer(memory_of(values)), obj.dtype, tuple(obj.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


class _Failed:
    """What rank 0 sends when it has nothing else to send."""

    def __init__(self, text: str) -> None:
        # Text and not the error itself: one of the user's own classes need not survive a pickle.
        self.text = text


class ScatterChannel:
    """One-way channel from rank 0 to every rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        on_host = world.backend is None or "gloo" in world.backend or "mpi" in world.backend
        self._device = torch.device("cpu") if on_host else world.device

    def send(self, messages: Sequence[object]) -> None:
        """Send one object to each rank; on rank 0 only.

        Raises:
            CollectiveError: An object cannot be pickled; the others get RemoteRankError.
        """
        if self._world.size == 1:
            return
        with self.telling():
            # By identity: ranks that read the same part are sent one object.
            packed = {key: _packed(message) for key, message in {id(each): each for each in messages}.items()}
        self._scatter([packed[id(message)] for message in messages])

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of a failure of the block: without a message they would wait until the group's timeout."""
        try:
            yield
        except Exception as failure:
            self.send([None] + [_Failed(repr(failure))] * (self._world.size - 1))
            raise

    def receive(self) -> Any:
        """Return the object that rank 0 sent to this rank.

        Raises:
            RemoteRankError: Rank 0 failed.
        """
        message = pickle.loads(self._scatter())  # which ends before what fills it up
        if isinstance(message, _Failed):
            raise RemoteRankError(
                f"Rank 0 could not read the data that it reads for all ranks; got {message.text}. Fix the error; its "
                "traceback is in the output of rank 0."
            )
        return message

    def _scatter(self, contents: Sequence[memoryview] = ()) -> memoryview:
        # Not by `scatter_object_list`, which needs NumPy and three collectives.
        longest = torch.tensor([max(map(len, contents), default=0)], device=self._device)
        dist.broadcast(longest, 0)
        received, sent = torch.empty(int(longest), dtype=torch.uint8, device=self._device), []
        for content in contents:
            filled = torch.zeros(len(received), dtype=torch.uint8, device="cpu")
            memory_of(filled)[: len(content)] = content
            sent.append(filled.to(self._device))
        dist.scatter(received, sent or None, src=0)
        return memory_of(received.cpu())


def _packed(message: object) -> memoryview:
    target = io.BytesIO()
    try:
        _Pickler(target, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    except Exception as failure:
        raise CollectiveError(
            "Batches that rank 0 reads for all ranks have to be picklable; got one with "
            f"{type(failure).__name__}: {failure}. Let the dataset and collate_fn give data alone, or use "
            "dispatch_batches=False."
        ) from failure
    return target.getbuffer()
