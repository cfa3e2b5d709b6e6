"""The frame: one collective of a fixed size that opens every operation between ranks.

A backend such as gloo ends the process, hangs or returns garbage when ranks bring unequal sizes to a collective. So
each operation begins with an all-gather whose size is the same on all ranks whatever they bring. A rank's part, the
frame, holds a header (operation, a 128-bit digest of structure, shapes and dtypes, whether the rank failed) and, where
it fits, the whole payload: most operations on small tensors are this one collective. What does not fit follows in a
second collective, sent only after every rank has seen that all agree; the next frames are then larger.

What a rank receives of all frames grows with the ranks. So more than `_FRAMES_UPTO` ranks open an operation with a
reduction of their headers, of the same size for any number of ranks, and see each other's only where they differ.

Everything that ranks do together on a process group goes through its one transport, barriers and the collectives that
others make (`control.in_step`) included. Only then is a frame sure to meet a frame, and two ranks that are in
different operations learn it from the first bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import pickle
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from accel_core._torch import all_gather_single, default_store, group_gather
from accel_core.comm.arrival import arrive
from accel_core.comm.disagreement import disagreement_message, ended_message, lost_message, remote_message
from accel_core.errors import (
    CollectiveError,
    ConfigurationError,
    PartView,
    RankDisagreementError,
    RankView,
    RemoteRankError,
)
from accel_core.host import environ
from accel_core.process import callsite
from accel_core.process.world import World, ended

_E = TypeVar("_E", bound=BaseException)
BACKGROUND = "background"
"""The group of a thread that works while the main one trains: its frames come at another time on each rank."""

# Little-endian and unpadded ("<"), so that machines of different kinds read the same bytes.
_HEADER = struct.Struct("<II16sQ")
_AGREED = 24
"""Bytes of the header, from its beginning, that have to be equal on all ranks: operation, state, digest."""
_FINE, _FAILED = 0, 1
_DESCRIBE = "describe"
_NO_DIGEST = bytes(16)
_SMALLEST_FRAME, _FIRST_FRAME, _ALL_FRAMES = 4 * 1024, 32 * 1024, 512 * 1024
_FRAMES_UPTO = 64
"""Number of ranks up to which all frames are gathered, as one collective then does where a reduction needs another."""
_WORDS = struct.Struct("<6Iq4I")
"""A header, and a digest of the payload, as the whole numbers that a reduction compares."""
_AGREED_WORDS = 6
_LENGTH = struct.Struct("<Q")
_MEMORY = 8
"""Number of past operations that a frame is made large enough for."""
_GATHERED_AT_ONCE = 32 * 2**20
"""Bytes up to which the contents of all ranks, each padded to the longest, travel together; above, one by one."""
_SHORT = 1024
"""Bytes of a rank that travel together with those of any number of ranks, which one by one would take very long."""
_TIMEOUT, _PATIENCE = "ACCELERATE_DEBUG_TIMEOUT", 60
"""How many seconds an operation waits for other ranks in debug mode, and the variable that says otherwise."""
_DIGITS = re.compile(r"\d+")


def digest_of(text: str) -> bytes:
    """Return 16 bytes that identify a text, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def reduces(world_size: int) -> bool:
    """Return whether so many ranks agree by reductions, because what each tells all others has to stay small."""
    return world_size > _FRAMES_UPTO


def largest_frame(world_size: int) -> int:
    """Return the largest frame of one rank in bytes: 256 KiB for two ranks, less with more, at least 4 KiB."""
    return max(_SMALLEST_FRAME, _ALL_FRAMES // world_size // 1024 * 1024)


class Message(NamedTuple):
    """What a rank brings to an operation."""

    digest: bytes = _NO_DIGEST  # 16 bytes that have to be equal on all ranks
    nbytes: int = 0  # length of the payload in bytes; it may differ between ranks
    # Makes, when ranks disagree, this rank's view: what each part is, by its path.
    describe: Callable[[], dict[str, PartView]] = dict


class _Met(NamedTuple):
    """What is known once all ranks were met.

    Attributes:
        headers: Each rank's, by rank; none where a reduction showed that what has to be equal is.
        longest: Bytes of the longest payload.
        alike: Whether every rank is known to bring the same payload.
    """

    headers: list[memoryview]
    longest: int
    alike: bool


class Transport:
    """The frames of one process group, with the memory that they use again and again.

    A frame grows and shrinks with what the last operations needed. Every rank sees every rank's needs in the headers,
    so all come to the same size.

    Attributes:
        group_name: Empty for the default group.
        capacity: Bytes of payload that fit into a frame.
        reduces: Whether an operation opens with a reduction of headers, as on many ranks, and frames hold no payload.
        device: Where payloads are packed: the device of the world, or the CPU for a group on the host.
        proven: Operations that all ranks were seen to agree on, where seeing it again would stall a device.
    """

    def __init__(self, world: World, group_name: str = "", group: dist.ProcessGroup | None = None) -> None:
        self.world = world
        self.group_name = group_name
        self.device = world.device if group is None else torch.device("cpu")
        self.default_group = dist.group.WORLD
        self._group: Any = self.default_group if group is None else group
        self._gather = group_gather(self._group)
        self.on_host = self.device.type == "cpu"
        self.proven: set[tuple[str, bytes]] = set()
        self._turn = threading.Lock()
        self._holder = 0
        self._current: Participation | None = None
        self.reduces = reduces(world.size)
        self._largest = _HEADER.size if self.reduces else largest_frame(world.size)
        self._needs: deque[int] = deque(maxlen=_MEMORY)
        self._wanted = min(_FIRST_FRAME, self._largest)
        self._allocate(self._wanted)

    @torch.inference_mode(False)
    def _allocate(self, size: int) -> None:
        # These tensors outlive the operation that needs them first. What is made inside `torch.inference_mode` can be
        # written to nowhere else: https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
        self.size = size
        self.capacity = size - _HEADER.size
        self._send = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._received = torch.zeros(self.world.size * size, dtype=torch.uint8, device=self.device)
        self._rows = self._received.view(self.world.size, size)
        # Python packs into memory of the host alone: for another device the header is copied there.
        self._header = self._send if self.on_host else torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._outgoing = memory_of(self._header)
        self._incoming = memory_of(self._received) if self.on_host else memoryview(b"")
        self._starts = range(0, self.world.size * size, size)

    def resize(self) -> None:
        """Take the size that the last operations ask for.

        Called where an operation begins and nowhere else: results of the operation before may be views into the old
        memory until then, and every rank comes by here at the same point, so that all frames keep one size.
        """
        if self._wanted != self.size:
            self._allocate(self._wanted)

    def _remember(self, need: int) -> None:
        """Note the longest payload of an operation; one too long for any frame needs none."""
        fits = need + _HEADER.size <= self._largest
        self._needs.append(need + _HEADER.size if fits else 0)
        most = max(self._needs)
        # Steps of an eighth to a quarter of the size: sizes that vary a little from call to call keep their frame.
        step = max(_SMALLEST_FRAME, 1 << max(0, most.bit_length() - 3))
        self._wanted = min(self._largest, max(_SMALLEST_FRAME, -(-most // step) * step))

    @property
    def payload(self) -> torch.Tensor:
        """This rank's room for a payload in the frame: a uint8 tensor of `capacity` bytes."""
        return self._send[_HEADER.size :]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return a part of every rank's payload, valid until the next frame."""
        return self._rows[:, _HEADER.size + start : _HEADER.size + stop]

    def exchange(self, message: Message, content: bytes | memoryview = b"") -> _Met:
        """Send the frame, whose payload is in place, and check that all ranks sent the same description.

        Raises:
            RankDisagreementError: Ranks differ in the operation or its digest; every rank names every rank's view.
            RemoteRankError: Another rank failed before it could take part, or is gone.
        """
        operation = self._operation()
        met = self._meet(operation, _FINE, message.digest, message.nbytes, content)
        self._remember(met.longest)
        mine = self._outgoing[:_AGREED]
        for header in met.headers:
            if header[:_AGREED] != mine:
                self._refuse(operation, message, [_HEADER.unpack(header) for header in met.headers])
        return met

    def exchange_bytes(self, content: bytes | memoryview, message: Message) -> list[bytes | memoryview]:
        """Send bytes of any length and return every rank's; raises what `exchange` does."""
        if len(content) <= self.capacity:
            self._write(content)
        met = self.exchange(message, content)
        if met.alike:
            return [content] * self.world.size
        lengths = [_length(header) for header in met.headers]
        if not lengths:
            lengths = self.all_gather(torch.tensor([len(content)], device=self.device)).tolist()
        if met.longest <= self.capacity:
            return [self._read(rank, length) for rank, length in enumerate(lengths)]
        if met.longest <= max(_GATHERED_AT_ONCE // self.world.size, _SHORT):
            return self._padded(content, lengths)
        # One rank after the other, each with its own length: none of them is padded to the longest.
        return [self._broadcast_bytes(content, length, rank) for rank, length in enumerate(lengths)]

    def gather_bytes(self, content: bytes | memoryview, message: Message) -> list[memoryview]:
        """Send bytes of any length to the main rank, and return every rank's there; raises what `exchange` does."""
        longest = self.exchange(message).longest + _LENGTH.size
        send = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        memory_of(send)[: _LENGTH.size + len(content)] = _LENGTH.pack(len(content)) + bytes(content)
        mine = send.to(self.device)
        received = [torch.empty_like(mine) for _ in range(self.world.size)] if self.world.is_main else None
        self._carry(dist.gather, mine, received)
        rows = [memory_of(each.cpu()) for each in received or ()]
        return [row[_LENGTH.size :][: _LENGTH.unpack_from(row)[0]] for row in rows]

    def _padded(self, content: bytes | memoryview, lengths: list[int]) -> list[bytes | memoryview]:
        longest = max(lengths)
        send = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        memory_of(send)[: len(content)] = content
        received = memory_of(self.all_gather(send.to(self.device)).cpu())
        return [received[rank * longest :][:length] for rank, length in enumerate(lengths)]

    def broadcast_bytes(self, content: bytes | memoryview, message: Message, source: int) -> bytes | memoryview:
        """Give every rank the bytes of one rank, while the others bring none; raises what `exchange` does."""
        if self.world.rank == source and len(content) <= self.capacity:
            self._write(content)
        length = self.exchange(message).longest
        return self._read(source, length) if length <= self.capacity else self._broadcast_bytes(content, length, source)

    def _broadcast_bytes(self, content: bytes | memoryview, length: int, source: int) -> bytes | memoryview:
        if not length:
            return b""
        if self.world.rank == source:
            # torch takes no memory that it might write to and must not, as that of bytes.
            held = bytearray(content) if isinstance(content, bytes) else content
            self.broadcast(torch.frombuffer(held, dtype=torch.uint8).to(self.device), source)
            return content
        received = torch.empty(length, dtype=torch.uint8, device=self.device)
        self.broadcast(received, source)
        return memory_of(received.cpu())

    def report(self, failure: BaseException | None) -> dict[int, str]:
        """Let every rank know which ranks failed; every rank calls it.

        Raises:
            RankDisagreementError: No rank failed, and ranks are in different operations.
            RemoteRankError: A rank is gone.
        """
        operation = self._operation()
        room = _SMALLEST_FRAME if self.reduces else self.capacity
        content = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()[:room]
        if len(content) <= self.capacity:
            self._write(content)
        state = _FINE if failure is None else _FAILED
        met = self._meet(operation, state, _NO_DIGEST, len(content))
        self._remember(met.longest)
        headers = [_HEADER.unpack(header) for header in met.headers]
        failures = self._failures(headers, content)
        if not failures and any(header[0] != _code(operation) for header in headers):
            self._disagree(operation, Message())
        return failures

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        """Gather a contiguous tensor that is known to be alike on all ranks, ranks along the first dim."""
        received = data.new_empty((self.world.size * data.shape[0], *data.shape[1:]))
        self._carry(all_gather_single, received, data)
        return received

    def all_reduce(self, data: torch.Tensor, op: object = dist.ReduceOp.SUM) -> None:
        """Combine a contiguous tensor, known to be alike on all ranks, in place."""
        self._carry(dist.all_reduce, data, op)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor, known to be alike on all ranks, with that of one rank."""
        self._carry(dist.broadcast, data, source)

    def _carry(self, collective: Callable[..., object], *args: object) -> None:
        operation = self._operation()
        try:
            collective(*args, group=self._group)
        except RuntimeError as failure:
            self._lose(operation, failure)

    def _lose(self, operation: str, failure: RuntimeError) -> NoReturn:
        """Raise an error that names the ranks that ended, if they noted it, and what the backend said otherwise."""
        site, rank = callsite.find(), self.world.rank
        gone = ended(self.world.size)
        if not gone:
            raise RemoteRankError(lost_message(operation, site, rank, failure)) from failure
        raise RemoteRankError(ended_message(operation, site, rank, gone)) from None

    def _operation(self) -> str:
        """Return the operation under way, and note that the others have been met in it."""
        current = self._current
        if current is None:
            raise CollectiveError(
                "A frame was sent outside of an operation; got none under way. Do it inside `participate(...)`."
            )
        current.is_met = True
        return current.operation

    def _meet(self, operation: str, state: int, digest: bytes, nbytes: int, content: bytes | memoryview = b"") -> _Met:
        """Send the frame, or what a reduction takes in its place."""
        if self.world.debug:
            seconds = environ.integer(_TIMEOUT, _PATIENCE) or _PATIENCE
            arrive(self.world, operation, seconds, meeting=f"an operation of {self.group_name!r}", limit=_TIMEOUT)
        _HEADER.pack_into(self._outgoing, 0, _code(operation), state, digest, nbytes)
        if not self.on_host:
            self._send[: _HEADER.size].copy_(self._header[: _HEADER.size])
        met = self._reduce_headers(operation, content) if self.reduces else None
        if met is not None:
            return met
        try:
            # Equal sizes on all ranks, always: gloo ends the process, or returns garbage, where they differ.
            # The group's own method: what torch.distributed wraps around it, to log and to time it, costs 0.1 ms.
            work = self._gather(self._received, self._send)
            if work is not None:
                work.wait()
        except RuntimeError as failure:
            self._lose(operation, failure)
        if self.on_host:
            headers = [self._incoming[at : at + _HEADER.size] for at in self._starts]
        else:
            table = memory_of(self._rows[:, : _HEADER.size].cpu().contiguous())
            headers = [table[at : at + _HEADER.size] for at in range(0, len(table), _HEADER.size)]
        return _Met(headers, max(map(_length, headers)), False)

    def _reduce_headers(self, operation: str, content: bytes | memoryview) -> _Met | None:
        """Return what one reduction shows; nothing where a rank failed, or brings what has to be equal and is not."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        words = torch.tensor(_WORDS.unpack(bytes(self._outgoing[: _HEADER.size]) + digest), device=self.device)
        largest = torch.stack([words, -words])
        try:
            self._group.allreduce([largest], dist.ReduceOp.MAX).wait()
        except RuntimeError as failure:
            self._lose(operation, failure)
        above, below = largest.tolist()
        equal = [high == -low for high, low in zip(above, below, strict=True)]
        if not all(equal[:_AGREED_WORDS]) or above[1] == _FAILED:
            return None
        return _Met([], above[_AGREED_WORDS], all(equal))

    def _write(self, content: bytes | memoryview) -> None:
        if self.on_host:
            self._outgoing[_HEADER.size : _HEADER.size + len(content)] = content
        elif content:
            self.payload[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _read(self, rank: int, length: int) -> bytes:
        if self.on_host:
            start = rank * self.size + _HEADER.size
            return bytes(self._incoming[start : start + length])
        return bytes(memory_of(self.rows(0, length)[rank].cpu()))

    def _failures(self, headers: list[tuple[Any, ...]], mine: bytes = b"") -> dict[int, str]:
        lengths = [length if state == _FAILED else 0 for _, state, _, length in headers]
        if not any(lengths):
            return {}
        texts = self._padded(mine, lengths) if self.reduces else map(self._read, range(len(lengths)), lengths)
        # `report` cuts a long message at the end of the frame, which may be inside a character.
        return {rank: bytes(text).decode(errors="replace") for rank, text in enumerate(texts) if text}

    def _refuse(self, operation: str, message: Message, headers: list[tuple[Any, ...]]) -> NoReturn:
        failures = self._failures(headers)
        if failures:
            raise RemoteRankError(remote_message(operation, self.world.rank, failures))
        self._disagree(operation, message)

    def _disagree(self, operation: str, message: Message) -> NoReturn:
        """Exchange every rank's view; all ranks come here when one does."""
        assert self._current is not None
        # Under one name on all ranks: this frame has to agree although the operations do not.
        self._current.operation = _DESCRIBE
        content = pickle.dumps(RankView(operation, callsite.find(), message.describe()))
        views = [pickle.loads(each) for each in self.exchange_bytes(content, Message(nbytes=len(content)))]
        raise RankDisagreementError(disagreement_message(views), views)


class Participation:
    """This rank's part in one operation of all ranks, from its preparation to its end.

    Where the preparation fails, before the others were met, the ranks that wait get it. Only one thread at a time
    takes part: the frames of two would mix, and which of them comes first differs from rank to rank, so that one's
    data would silently meet the other's. The second one is refused instead.

    Attributes:
        operation: The name; outside the main thread with the name of the thread, which has to be the same on all
            ranks but for the number in it.
        is_met: Whether the other ranks were met, or are about to be.
    """

    __slots__ = ("is_met", "operation", "transport")

    def __init__(self, transport: Transport, operation: str) -> None:
        self.transport = transport
        self.operation = operation
        if threading.get_ident() != threading.main_thread().ident and not transport.group_name:
            self.operation = f"{operation} in thread {_thread_name()!r}"
        self.is_met = False

    def __enter__(self) -> Transport:
        """Begin.

        Raises:
            CollectiveError: Another thread, or this one further up, is in an operation.
        """
        transport = self.transport
        if not transport._turn.acquire(blocking=False):
            raise self._contended()
        transport._current, transport._holder = self, threading.get_ident()
        transport.resize()
        return transport

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, and tell the others of a failure."""
        try:
            # Not for Ctrl-C or an exit: telling the others means to wait for them, and they notice a process that ends.
            if isinstance(failure, Exception) and not self.is_met:
                known_to_all(failure)
                # Where the others are gone or elsewhere, it is this rank's own failure that explains it.
                with contextlib.suppress(CollectiveError):
                    self.transport.report(failure)
        finally:
            self._leave()

    def _leave(self) -> None:
        # Before the turn is free: the thread that takes it next enters itself here.
        self.transport._current = None
        self.transport._turn.release()

    def _contended(self) -> CollectiveError:
        """Return the error of this operation, which names that which is under way."""
        other, holder = self.transport._current, self.transport._holder
        where = callsite.find(holder)
        return CollectiveError(
            f"Two operations between ranks run at once in one process, so their data would mix; got {self.operation} "
            f"at {callsite.find()} while {other.operation if other else 'another one'} at {where} is under way. "
            "Let one thread make all calls that other ranks take part in, or let threads take turns with a lock, in "
            "the same order on all ranks."
        )


def _length(header: memoryview) -> int:
    """Return the bytes of payload that a header announces."""
    length: int = _HEADER.unpack(header)[3]
    return length


def _thread_name() -> str:
    """Return this thread's name without numbers: Python numbers threads by itself, and differently on each rank."""
    return _DIGITS.sub("", threading.current_thread().name)


@functools.lru_cache(maxsize=1024)
def _code(operation: str) -> int:
    # Not `hash`, which gives each process another number for the same text:
    # https://docs.python.org/3/reference/datamodel.html#object.__hash__
    return zlib.crc32(operation.encode())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without NumPy and without a copy."""
    # The address of an empty tensor is 0, where there is no memory to look into.
    if tensor.numel() == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    raw._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive as long as the view
    return memoryview(raw).cast("B")


_open: dict[str, Transport] = {}
"""The transports of the default process group as it is now, by the name of their group.

They belong to the process group and not to the World: a state that is reset on one rank alone must not give that rank
frames of another size. Groups are compared as objects that are held here, so a new group is never taken for an old one.
"""


def open_transport(world: World, group_name: str = "") -> Transport:
    """Return the transport of a world of several processes.

    Raises:
        CollectiveError: The processes left their group.
    """
    if not dist.is_initialized():
        raise CollectiveError(
            f"An operation between {world.size} ranks needs their process group, and it was destroyed or never made. "
            "Do it before destroy_process_group()."
        )
    found = _open.get(group_name)
    if found is not None and found.default_group is dist.group.WORLD and (group_name or found.world == world):
        return found
    if group_name:
        with participate(world, f"opening the group {group_name!r}") as transport:
            # `new_group` waits for all ranks and carries no frame, so all of them have to be seen here first:
            # https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
            transport.exchange(Message())
            # torch would wait half an hour, however long the user lets the default group wait.
            store: Any = default_store()
            patience = max(store.timeout, default_pg_timeout)
            made = Transport(world, group_name, dist.new_group(backend="gloo", timeout=patience))
    else:
        for name in [name for name, held in _open.items() if held.default_group is not dist.group.WORLD]:
            del _open[name]
        made = Transport(world)
    _open[group_name] = made
    return made


def participate(world: World, operation: str, group_name: str = "") -> Participation:
    """Return a context for this rank's part in one operation of all ranks.

    Inside, `transport.exchange` and its relatives meet the other ranks. An error before that reaches them as
    RemoteRankError.
    """
    return Participation(open_transport(world, group_name), operation)


def known_to_all(failure: _E) -> _E:
    """Mark a failure that all ranks learn of."""
    # Past the class's own `__setattr__`, which may refuse: that of a frozen dataclass does.
    BaseException.__setattr__(failure, "_ranks_know", True)
    return failure


def ranks_know(failure: BaseException) -> bool:
    """Return whether all ranks learned of a failure in the operation that raised it, so that none waits for another."""
    return isinstance(failure, RankDisagreementError | RemoteRankError) or getattr(failure, "_ranks_know", False)


def check_rank(rank: int, size: int) -> None:
    """Refuse a number that is not a rank."""
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"from_process must be a rank; got {rank} with {size} ranks. Use a number from 0 to {size - 1}."
        )
