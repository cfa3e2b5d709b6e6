"""How weights are prefetched to the device they compute on: through streams, or as pages of a memory map."""

import functools
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_bigmodel.offload.index import MappedFile
from accel_bigmodel.offload.schedule import Block
from accel_bigmodel.offload.store import OffloadedWeightsLoader
from accel_core._records import record
from accel_core.modules.sizes import convert_file_size_to_int


@record
class TransferSpec:
    """The weights of a block, as a transport gets them."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    store: OffloadedWeightsLoader
    kept_at: int | None = None  # how many pages this process had waited for when those of the block stayed mapped

    @functools.cached_property
    def places(self) -> Sequence[tuple[MappedFile, str]]:
        """The files that hold the weights, and the names there; weights in memory are left out."""
        found = (self.store.file_of(name) for name in self.names)
        return [place for place in found if place is not None]


@record
class Weights:
    """The weights of a block on their device."""

    tensors: list[torch.Tensor]
    sources: list[torch.Tensor] = field(default_factory=list)  # what they were copied from, or are


def _spec_of(block: Block[Weights]) -> TransferSpec:
    spec: TransferSpec = block.source
    return spec


class MapTransport:
    """Weights in files, computed with on the CPU: the map's pages are read ahead, nothing is copied.

    Pages that stay mapped are the page cache's, which takes them back when memory is short. Where all of them cannot
    stay, each block's are given back after it ran, so that the system need not look for pages to take.

    Args:
        nbytes: Bytes of all blocks.
        keep: Whether pages stay mapped; None for as long as the memory that is available has room for all.
    """

    def __init__(self, nbytes: int, keep: bool | None) -> None:
        self.nbytes = nbytes
        self.keep = keep
        self._looked = -math.inf
        self._has_room = False

    def start(self, block: Block[Weights]) -> None:
        """Have the kernel read the block's pages ahead, unless they stayed and none was taken back since."""
        spec = _spec_of(block)
        stayed = spec.kept_at is not None and spec.kept_at == _waited()
        for file, name in spec.places:
            if not stayed:
                file.will_need(name)

    def finish(self, block: Block[Weights], ticket: Any) -> Weights:
        """Return views of the map; tensors of another dtype are cast."""
        spec = _spec_of(block)
        sources = [spec.store.stored(name) for name in spec.names]
        return Weights([s.to(dtype) for s, dtype in zip(sources, spec.dtypes, strict=True)], sources)

    def cancel(self, block: Block[Weights], ticket: Any) -> None:
        """Do nothing: pages that were only read ahead hold no memory of this process."""

    def discard(self, block: Block[Weights], content: Weights) -> None:
        """Release the pages, unless they stay or were written to: the map holds the only copy of what was written."""
        spec = _spec_of(block)
        keeps = self._keeps()
        spec.kept_at = _waited() if keeps else None
        if keeps or any(file.writes(name) for file, name in spec.places):
            return
        for file, name in spec.places:
            file.done_with(name)

    def _keeps(self) -> bool:
        if self.keep is not None:
            return self.keep
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            import psutil  # here, because every import of the drop-in would wait for it

            self._looked, self._has_room = time.monotonic(), self.nbytes <= psutil.virtual_memory().available
        return self._has_room


_SECONDS_BETWEEN_LOOKS = 1.0


def _waited() -> int:
    """Return how many pages this process had to wait for: when some were taken back, others may have been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def pin_in_place(parameters: Iterable[nn.Parameter], device: torch.device, budget: int | str | None) -> None:
    """Put parameters that wait on the CPU for an accelerator into pinned memory, as far as a budget of bytes goes.

    Copies to the device begin there; what is left over goes through a pinned buffer. By default the budget is a quarter
    of the machine's memory.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or device.type != accelerator.type or device.type == "mps":
        return
    import psutil  # here, because every import of the drop-in would wait for it

    left = psutil.virtual_memory().total // 4 if budget is None else convert_file_size_to_int(budget)
    for parameter in parameters:
        taken = 1 << (parameter.nbytes - 1).bit_length()  # torch's allocator takes powers of two
        plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu" and not parameter.is_inference()
        if plain and parameter.numel() and taken <= left and not parameter.is_pinned():
            parameter.data = parameter.data.pin_memory()  # the same parameter, so that ordinary memory is free now
            left -= taken


class _Staging:
    """Pinned buffers, reused when the copy out of them is done."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[tuple[torch.Tensor, Any]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        # The smallest, so that a bias does not take the buffer of a weight.
        for number, (buffer, event) in sorted(enumerate(self._free), key=lambda each: each[1][0].numel()):
            if buffer.numel() >= nbytes and (event is None or event.query()):
                del self._free[number]
                return buffer
        # Under `torch.device(...)` it would be on that device.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def give(self, buffers: Sequence[torch.Tensor], event: Any) -> None:
        self._free.extend((buffer, event) for buffer in buffers)
        # Bounded, because the system cannot page out pinned memory.
        self._free = self._free[-8:]


class StreamTransport:
    """Weights on the CPU or in files, computed with on an accelerator: copied by a stream and a thread of their own.

    Args:
        device: The accelerator.
        budget: Bytes that may be there at once. The program runs ahead of the device, so weights that it released may
            still be computed with: copies wait for that where there is no room beside them.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device, self.budget = device, budget
        self._there = 0  # bytes, with those that the device still computes with
        self._ends: deque[tuple[Any, int]] = deque()  # of computations with weights that were released
        self._stream = torch.Stream(device)
        self._staging = _Staging(pinned=device.type == "cuda")
        self._worker: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start(self, block: Block[Weights]) -> Future[tuple[Weights, Any]]:
        """Have the thread stage and copy the block's weights."""
        with self._lock:
            if self._worker is None:
                # Only one thread: staging buffers have no lock, and blocks arrive in the order in which they were
                # started.
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="accel-prefetch")
        self._there += block.nbytes
        ends = []
        while self._ends and self._there > self.budget:
            end, nbytes = self._ends.popleft()
            ends.append(end)
            self._there -= nbytes
        return self._worker.submit(self._copy, _spec_of(block), ends)

    def _copy(self, spec: TransferSpec, ends: Sequence[Any]) -> tuple[Weights, Any]:
        for end in ends:
            end.synchronize()
        weights = Weights([])
        used: list[torch.Tensor] = []
        with self._stream:
            for name, dtype in zip(spec.names, spec.dtypes, strict=True):
                source = spec.store.stored(name)
                host = source.detach()
                # Cast here where that does not make it larger: the window has no room for what it is stored as.
                staged_as = min(dtype, host.dtype, key=lambda each: each.itemsize)
                casts = staged_as != host.dtype
                if host.device.type == "cpu" and host.numel() and (casts or not host.is_pinned()):
                    nbytes = host.numel() * staged_as.itemsize
                    buffer = self._staging.take(nbytes)
                    used.append(buffer)
                    host = buffer[:nbytes].view(staged_as).view(host.shape).copy_(host)
                # New each time, so that what autograd saved of the last one stays as it was.
                arrived = host.to(self.device, non_blocking=True)
                weights.tensors.append(arrived if arrived.dtype == dtype else arrived.to(dtype))
                weights.sources.append(source)
            event = self._stream.record_event()
        self._staging.give(used, event)
        return weights, event

    def finish(self, block: Block[Weights], ticket: Future[tuple[Weights, Any]]) -> Weights:
        """Make the computing stream wait for the copy, and tell the allocator that it uses the memory."""
        try:
            weights, event = ticket.result()
        except BaseException:
            self._there -= block.nbytes
            raise
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(event)
        for tensor in weights.tensors:
            if tensor.device.type == self.device.type:
                tensor.record_stream(stream)
        return weights

    def cancel(self, block: Block[Weights], ticket: Future[tuple[Weights, Any]]) -> None:
        """Wait for a running copy and release its memory."""
        self._there -= block.nbytes
        if not ticket.cancel():
            wait([ticket])  # and ignore its failure, because the weights are no longer wanted

    def discard(self, block: Block[Weights], content: Weights) -> None:
        """Release the tensors; the allocator waits for the computing stream."""
        content.tensors.clear()  # first: what the allocator waits for is done when the event is
        self._ends.append((torch.accelerator.current_stream(self.device).record_event(), block.nbytes))
