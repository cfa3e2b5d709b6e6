"""The frame: one collective of a fixed size that opens every operation between ranks.

A backend such as gloo ends the process, hangs or returns garbage when ranks bring unequal sizes to a collective. So
each operation begins with an all-gather whose size is the same on all ranks whatever they bring. A rank's part, the
frame, holds a header (operation, a 128-bit digest of structure, shapes and dtypes, whether the rank failed) and, where
it fits, the whole payload: most operations on small tensors are this one collective. What does not fit follows in a
second collective, sent only after every rank has seen that all agree; the next frames are then larger.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from accel_core.errors import CollectiveError, ConfigurationError, RankDisagreementError, RemoteRankError
from accel_core.process import callsite, rollcall
from accel_core.process.world import World

__all__ = [
    "Channel",
    "Parcel",
    "check_rank",
    "digest_of",
    "disagreement_message",
    "largest_frame",
    "open_channel",
    "remote_message",
]

_HEADER = struct.Struct("<II16sQ")
_AGREED = 24
"""Bytes of the header, from its beginning, that have to be equal on all ranks: operation, state, digest."""
_FINE, _FAILED = 0, 1
_DESCRIBE = "describe"
_SMALLEST_FRAME, _FIRST_FRAME, _ALL_FRAMES = 4 * 1024, 32 * 1024, 512 * 1024
_MEMORY = 8
"""Number of past operations that a frame is made large enough for."""
_DIFFERENCES_SHOWN = 8


def digest_of(text: str) -> bytes:
    """Return 16 bytes that stand for `text` in every process."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def largest_frame(world_size: int) -> int:
    """Return the bytes to which one rank's frame may grow: 256 KiB for two ranks, less with more, never under 4 KiB."""
    return max(_SMALLEST_FRAME, _ALL_FRAMES // world_size // 1024 * 1024)


class Parcel(NamedTuple):
    """What a rank brings to an operation.

    Attributes:
        operation: Name of the operation, as the user called it.
        digest: 16 bytes that have to be equal on all ranks.
        nbytes: Length of the payload in bytes; it may differ between ranks.
        describe: Makes, when ranks disagree, this rank's view: a name for each part and what it is.
    """

    operation: str
    digest: bytes
    nbytes: int
    describe: Callable[[], dict[str, str]]


class Channel:
    """The frames of one world, with the memory that they use again and again.

    A frame grows and shrinks with what the last operations needed. Every rank sees every rank's needs in the headers,
    so all come to the same size.

    Args:
        world: The processes; more than one.

    Attributes:
        capacity: Bytes of payload that fit into a frame.
        device: Where payloads are packed: the device of the world.
        windows: Views into the frames that operations keep, by digest, as long as the frames have this size.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.device = world.device
        self.group = dist.group.WORLD
        self.on_host = self.device.type == "cpu"
        self._largest = largest_frame(world.size)
        self._needs: deque[int] = deque(maxlen=_MEMORY)
        self._wanted = min(_FIRST_FRAME, self._largest)
        self._allocate(self._wanted)

    def _allocate(self, size: int) -> None:
        self.size = size
        self.capacity = size - _HEADER.size
        self._send = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._received = torch.zeros(self.world.size * size, dtype=torch.uint8, device=self.device)
        self._rows = self._received.view(self.world.size, size)
        self._header = self._send if self.on_host else torch.zeros(size, dtype=torch.uint8)
        self._outgoing = _memory(self._header)
        self._incoming = _memory(self._received) if self.on_host else memoryview(b"")
        self._starts = range(0, self.world.size * size, size)
        self.windows: dict[bytes, Any] = {}

    def serves(self, world: World) -> bool:
        """Say whether this is the channel of `world` and of the process group as it is now."""
        return (self.world is world or self.world == world) and self.group is dist.group.WORLD

    def settle(self) -> None:
        """Take the size that the last operations ask for; called where an operation begins, on every rank."""
        if self._wanted != self.size:
            self._allocate(self._wanted)

    def _remember(self, need: int) -> None:
        """Note the longest payload of an operation; one too long for any frame needs none."""
        fits = need + _HEADER.size <= self._largest
        self._needs.append(need + _HEADER.size if fits else 0)
        most = max(self._needs)
        step = max(_SMALLEST_FRAME, 1 << max(0, most.bit_length() - 3))
        self._wanted = min(self._largest, max(_SMALLEST_FRAME, -(-most // step) * step))

    @property
    def payload(self) -> torch.Tensor:
        """This rank's room for a payload in the frame: a uint8 tensor of `capacity` bytes."""
        return self._send[_HEADER.size :]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return a part of every rank's payload, valid until the next frame.

        Args:
            start: First byte.
            stop: Byte after the last one.

        Returns:
            uint8, shape `(ranks, stop - start)`.
        """
        return self._rows[:, _HEADER.size + start : _HEADER.size + stop]

    def exchange(self, parcel: Parcel) -> list[int]:
        """Send the frame, whose payload is in place, and check that all ranks brought the same.

        Returns:
            Every rank's payload length in bytes.

        Raises:
            RankDisagreementError: Ranks differ; every rank raises it and names every rank's view.
            RemoteRankError: Another rank failed before it could take part.
        """
        _HEADER.pack_into(self._outgoing, 0, _code(parcel.operation), _FINE, parcel.digest, parcel.nbytes)
        headers = self._meet(parcel.operation)
        mine = self._outgoing[:_AGREED]
        lengths = [_HEADER.unpack(header)[3] for header in headers]
        self._remember(max(lengths))
        for header in headers:
            if header[:_AGREED] != mine:
                self._refuse(parcel, [_HEADER.unpack(header) for header in headers])
        return lengths

    def exchange_bytes(self, parcel: Parcel, content: bytes) -> list[bytes]:
        """Send bytes of any length and return every rank's.

        Raises:
            RankDisagreementError: Ranks differ in the operation or its digest.
            RemoteRankError: Another rank failed before it could take part.
        """
        if len(content) <= self.capacity:
            self._write(content)
        lengths = self.exchange(parcel)
        longest = max(lengths)
        if longest <= self.capacity:
            return [self._read(rank, length) for rank, length in enumerate(lengths)]
        send = torch.zeros(longest, dtype=torch.uint8)
        _memory(send)[: len(content)] = content
        received = _memory(self.all_gather(send.to(self.device)).cpu())
        return [bytes(received[rank * longest : rank * longest + length]) for rank, length in enumerate(lengths)]

    def taking_part(self, operation: str) -> TakingPart:
        """Return a context that tells the other ranks when this one fails while it prepares its part."""
        return TakingPart(self, operation)

    def report(self, operation: str, failure: Exception | None) -> dict[int, str]:
        """Meet all ranks and return the failures they report, by rank.

        Raises:
            RankDisagreementError: No rank failed, and ranks are in different operations.
        """
        content = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()[: self.capacity]
        self._write(content)
        state = _FINE if failure is None else _FAILED
        _HEADER.pack_into(self._outgoing, 0, _code(operation), state, bytes(16), len(content))
        headers = [_HEADER.unpack(header) for header in self._meet(operation)]
        self._remember(max(header[3] for header in headers))
        failures = self._failures(headers)
        if not failures and any(header[0] != _code(operation) for header in headers):
            self._disagree(Parcel(operation, bytes(16), 0, dict))
        return failures

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        """Gather a contiguous tensor that is known to be alike on all ranks, ranks along the first dim.

        Args:
            data: Shape `(n, ...)`.

        Returns:
            Shape `(ranks * n, ...)`.
        """
        received = data.new_empty((self.world.size * data.shape[0], *data.shape[1:]))
        dist.all_gather_single(received, data)
        return received

    def _meet(self, operation: str) -> list[memoryview]:
        """Send the frame and return every rank's header."""
        if self.world.debug:
            rollcall.arrive(self.world, operation)
        if not self.on_host:
            self._send[: _HEADER.size].copy_(self._header[: _HEADER.size])
        # The group's own method: what torch.distributed wraps around it, to log and to time it, costs 0.1 ms.
        work = self.group.all_gather_single(self._received, self._send)  # type: ignore[union-attr]
        if work is not None:
            work.wait()
        if self.on_host:
            return [self._incoming[at : at + _HEADER.size] for at in self._starts]
        table = _memory(self._rows[:, : _HEADER.size].cpu().contiguous())
        return [table[at : at + _HEADER.size] for at in range(0, len(table), _HEADER.size)]

    def _write(self, content: bytes) -> None:
        if self.on_host:
            self._outgoing[_HEADER.size : _HEADER.size + len(content)] = content
        elif content:
            self.payload[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _read(self, rank: int, length: int) -> bytes:
        if self.on_host:
            start = rank * self.size + _HEADER.size
            return bytes(self._incoming[start : start + length])
        return bytes(_memory(self.rows(0, length)[rank].cpu()))

    def _failures(self, headers: list[tuple[Any, ...]]) -> dict[int, str]:
        return {
            rank: self._read(rank, length).decode(errors="replace")
            for rank, (_, state, _, length) in enumerate(headers)
            if state == _FAILED
        }

    def _refuse(self, parcel: Parcel, headers: list[tuple[Any, ...]]) -> NoReturn:
        failures = self._failures(headers)
        if failures:
            raise RemoteRankError(remote_message(parcel.operation, self.world.rank, failures))
        self._disagree(parcel)

    def _disagree(self, parcel: Parcel) -> NoReturn:
        """Exchange every rank's view; all ranks come here when one does."""
        view = {"operation": parcel.operation, "site": callsite.find(), "parts": parcel.describe()}
        content = json.dumps(view).encode()
        described = Parcel(_DESCRIBE, bytes(16), len(content), dict)
        views = [json.loads(text) for text in self.exchange_bytes(described, content)]
        raise RankDisagreementError(disagreement_message(views), views)


class TakingPart:
    """A block in which a rank prepares its part of an operation; where it fails, the waiting ranks are told.

    Args:
        channel: Where they wait.
        operation: What they wait in.
    """

    __slots__ = ("channel", "operation")

    def __init__(self, channel: Channel, operation: str) -> None:
        self.channel = channel
        self.operation = operation

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Tell of a failure."""
        if isinstance(failure, Exception):
            self.channel.report(self.operation, failure)


def remote_message(doing: str, rank: int, failures: dict[int, str]) -> str:
    """Write what a healthy rank says when others failed."""
    told = "; ".join(f"rank {other}: {text.rstrip('.')}" for other, text in sorted(failures.items()))
    return (
        f"{doing} was given up on rank {rank}, because {_ranks(failures)} failed: {told}. "
        "Mend what that rank reports; its own traceback is in its output."
    )


def disagreement_message(views: list[dict[str, Any]]) -> str:
    """Write every rank's view of an operation in which they do not agree."""
    operations = {view["operation"] for view in views}
    lines = []
    if len(operations) > 1:
        what = "Ranks are in different operations"
        todo = "Make every rank call the same operations in the same order: look for a branch on the rank."
    else:
        what = f"Ranks brought different data to {operations.pop()}"
        todo = "Give every rank the same structure, shapes and dtypes; pad_across_processes makes sizes equal."
    everywhere = list(dict.fromkeys(part for view in views for part in view["parts"]))
    unequal = [part for part in everywhere if len({view["parts"].get(part) for view in views}) > 1]
    shown = unequal[:_DIFFERENCES_SHOWN]
    for rank, view in enumerate(views):
        parts = ", ".join(f"{part or 'the tensor'}: {view['parts'].get(part, 'absent')}" for part in shown)
        lines.append(f"  rank {rank}: {view['operation']} at {view['site']}" + (f"; {parts}" if parts else ""))
    if len(unequal) > len(shown):
        lines.append(f"  and {len(unequal) - len(shown)} more parts that differ")
    return "\n".join([f"{what}:", *lines, todo])


def _ranks(numbers: dict[int, str]) -> str:
    listed = ", ".join(str(number) for number in sorted(numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _code(operation: str) -> int:
    return zlib.crc32(operation.encode())


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous uint8 tensor on the CPU, without numpy and without a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    raw._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive as long as the view
    return memoryview(raw).cast("B")


_current: Channel | None = None


def open_channel(world: World) -> Channel:
    """Return the channel of a world of several processes, ready for the next operation.

    Raises:
        CollectiveError: The processes left their group.
    """
    global _current
    if not dist.is_initialized():
        raise CollectiveError(
            f"An operation between {world.size} ranks needs their process group, and it was destroyed or never made. "
            "Do it before destroy_process_group()."
        )
    if (
        _current is None
        or (_current.world is not world and _current.world != world)
        or _current.group is not dist.group.WORLD
    ):
        _current = Channel(world)
    _current.settle()
    return _current


def check_rank(rank: int, size: int) -> None:
    """Refuse a number that is no rank.

    Raises:
        ConfigurationError: `rank` is not between 0 and `size` - 1.
    """
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"from_process must be a rank; got {rank} with {size} ranks. Use a number from 0 to {size - 1}."
        )
