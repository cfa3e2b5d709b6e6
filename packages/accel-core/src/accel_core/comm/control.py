"""The control channel: small values that ranks tell each other, and failures that all of them learn of.

Whatever ranks agree on goes through here: that all have come to a point, who failed, which checkpoint, how many rows.
It travels in the frames of `transport`, in one sequence with `gather` and its relatives, so a rank at a barrier and
one in a gather learn where the other is. What a thread does beside training gets a process group of its own.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accel_core.comm.disagreement import remote_message
from accel_core.comm.transport import (
    Message,
    Transport,
    check_rank,
    digest_of,
    known_to_all,
    memory_of,
    open_transport,
    participate,
    ranks_know,
)
from accel_core.errors import CollectiveError, PartView, RemoteRankError
from accel_core.process import world as process_world
from accel_core.process.world import World

_NO_PICKLE = b"-"  # sent in place of a value that cannot be pickled; every pickle is longer
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class Channel:
    """What the ranks of a world tell each other in the course of one thing that they do together.

    Every method but `exchange_among` is called by every rank, in the same order. With one process each returns at once.
    They raise RankDisagreementError where a rank is in another operation, RemoteRankError where one failed or is gone.
    """

    def __init__(self, world: World, operation: str, *, group_name: str = "") -> None:
        self.world = world
        self.operation = operation
        self.group_name = group_name
        if group_name and world.size > 1:
            open_transport(world, group_name)

    def _participate(self) -> AbstractContextManager[Transport]:
        return participate(self.world, self.operation, self.group_name)

    def exchange(self, value: _T, check: Callable[[Any], None] | None = None) -> list[_T]:
        """Return the value that each rank brought, by rank; what `check` raises reaches all of them.

        Raises:
            CollectiveError: It cannot be pickled; the other ranks get RemoteRankError.
        """
        if self.world.size == 1:
            return [value]
        with self._participate() as transport:
            if check is not None:
                check(value)
            content = _pickled(value)
            received = transport.exchange_bytes(content, Message(nbytes=len(content)))
        return [pickle.loads(each) for each in received]

    def exchange_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank: `exchange` without pickling, cheap enough for every step."""
        if self.world.size == 1:
            return [content]
        with self._participate() as transport:
            return [bytes(text) for text in transport.exchange_bytes(content, Message(nbytes=len(content)))]

    def exchange_among(self, value: _T, members: Sequence[int]) -> list[_T]:
        """Return the value that each of some ranks brought, in the order of `members`.

        The other ranks need not come here, so this is not an operation of all ranks: a member that is missing is waited
        for until the timeout of the process group.

        Raises:
            CollectiveError: The value cannot be pickled; the other members get RemoteRankError.
        """
        if self.world.rank not in members or len(members) == 1:
            return [value]
        rank = self.world.rank
        # Pickles are made and read on the host, so they stay there where the group can send from it.
        device = torch.device("cpu") if "gloo" in str(self.world.backend) else self.world.device
        failure: CollectiveError | None = None
        try:
            mine = bytearray(_pickled(value))
        except CollectiveError as error:
            failure, mine = error, bytearray(_NO_PICKLE)
        received: dict[int, memoryview] = {}
        for source in members:  # in one order on all of them: whoever sends has its receivers waiting
            # Not by torch's lists of objects, which need NumPy.
            length = torch.tensor([len(mine)], device=device)
            _pass_on(length, source, members)
            room = mine if source == rank else bytearray(int(length))
            content = torch.frombuffer(room, dtype=torch.uint8).to(device)
            _pass_on(content, source, members)
            received[source] = memory_of(content.cpu())
        if failure is not None:
            raise known_to_all(failure)
        failed = {each: "its value cannot be pickled" for each, told in received.items() if told == _NO_PICKLE}
        if failed:
            raise RemoteRankError(remote_message(self.operation, rank, failed))
        return [value if source == rank else pickle.loads(content) for source, content in received.items()]

    def broadcast(self, value: _T, source: int = 0, *, kind: str = "an object") -> _T:
        """Return the value that one rank brought.

        Raises:
            CollectiveError: It cannot be pickled; the other ranks get RemoteRankError.
            ConfigurationError: There is no such rank.
            RankDisagreementError: Also where another rank has another `source`, or asks for another `kind` of value.
        """
        if self.world.size == 1:
            return value
        mine = self.world.rank == source
        with self._participate() as transport:
            # Inside of the operation, as the pickling is: where it fails, the ranks that wait get the error.
            check_rank(source, self.world.size)
            content = _pickled(value) if mine else memoryview(b"")
            parts = {"source": PartView(f"rank {source}"), "the value": PartView(kind)}
            message = Message(digest_of(f"{source} {kind}"), len(content), lambda: parts)
            received = transport.broadcast_bytes(content, message, source)
            result: _T = value if mine else pickle.loads(received)
        return result

    def gather(self, value: _T) -> list[_T]:
        """Return the value that each rank brought, by rank, on the main rank; on the others nothing.

        Raises:
            CollectiveError: It cannot be pickled; the other ranks get RemoteRankError.
        """
        if self.world.size == 1:
            return [value]
        with self._participate() as transport:
            content = _pickled(value)
            return [pickle.loads(each) for each in transport.gather_bytes(content, Message(nbytes=len(content)))]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum over all ranks of each of some whole numbers, each below 2**63; all bring as many."""
        if self.world.size == 1:
            return list(numbers)
        with self._participate() as transport:
            transport.exchange(Message(digest_of(f"sums of {len(numbers)}")))
            data = torch.tensor(numbers, dtype=torch.int64, device=transport.device)
            transport.all_reduce(data)
            sums: list[int] = data.tolist()
        return sums

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is true."""
        return b"\1" in self.exchange_bytes(b"\1" if flag else b"\0")

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.world.size > 1:
            with self._participate() as transport:
                transport.exchange(Message())

    def agree(self, failure: BaseException | None, doing: str | None = None) -> None:
        """Meet all ranks and go on only if none of them failed.

        Raises:
            BaseException: `failure`, on the ranks that failed.
            RemoteRankError: On the others, with the failed ranks and their messages.
        """
        failures: dict[int, str] = {}
        if self.world.size > 1:
            with self._participate() as transport:
                failures = transport.report(failure)
        if failure is not None:
            raise failure
        if failures:
            raise RemoteRankError(remote_message(doing or self.operation, self.world.rank, failures))

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block on every rank, and go on only if it succeeded on all of them.

        A rank whose block failed keeps its own error; the others get one that names it, before any continues. The block
        may hold other operations of all ranks: a failure in one of those reaches all of them there.

        Raises:
            Exception: What the block raised, on the ranks where it did.
            RemoteRankError: On the others.
        """
        try:
            yield
        except Exception as failure:
            if ranks_know(failure):
                raise
            self.agree(failure, doing)
        else:
            self.agree(None, doing)


def agree(failure: Exception | None, doing: str) -> None:
    """Meet all ranks and go on only if none of them failed; see `Channel.agree`."""
    Channel(process_world.ensure(), doing).agree(failure)


@contextmanager
def in_step(world: World, operation: str, parts: Mapping[str, PartView]) -> Iterator[None]:
    """Let all ranks into a block in which someone else's code makes collectives on the default process group.

    Such collectives carry no frame: against the frame of a rank that is elsewhere, gloo would end a process. So the
    ranks meet first, and show that they bring what makes the collectives alike.

    Raises:
        CollectiveError: Another thread of this process is in an operation.
        RankDisagreementError: A rank is in another operation, or brings something else.
        RemoteRankError: A rank is gone.
    """
    if world.size == 1:
        yield
        return
    with participate(world, operation) as transport:
        transport.exchange(Message(digest_of(" ".join(map(str, parts.values()))), describe=lambda: dict(parts)))
        yield


def wait_for_all(world: World, operation: str = "wait_for_everyone") -> None:
    """Stop until every rank has come here; with one process, return at once."""
    Channel(world, operation).wait()


@contextmanager
def main_first(world: World, is_first: bool) -> Iterator[None]:
    """Let one rank of each group through the block before the others.

    Raises:
        RankDisagreementError: A rank is in another operation.
        RemoteRankError: A rank that went first raised; its own error leaves the block on that rank, and no rank waits
            for one that is gone.
    """
    channel = Channel(world, "main_process_first")
    if not is_first:
        channel.agree(None)
        yield
        return
    try:
        yield
    # Ctrl-C and exits as well: the others wait at this point until they get an answer.
    except BaseException as failure:
        # An operation inside the block met the ranks that wait: they have left their waiting already.
        if not ranks_know(failure):
            channel.agree(failure)
        raise
    channel.agree(None)


def only_when(chosen: bool, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Restrict a function to the ranks where `chosen` holds."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return function(*args, **kwargs) if chosen else None

    return run


def _pass_on(tensor: torch.Tensor, source: int, members: Sequence[int]) -> None:
    """Give a tensor of one rank to the others of some."""
    if dist.get_rank() != source:
        dist.recv(tensor, source)
        return
    for other in members:
        if other != source:
            dist.send(tensor, other)


def _pickled(value: object) -> memoryview:
    """Pickle an object into memory that can be sent without a copy.

    Raises:
        CollectiveError: It cannot be pickled.
    """
    target = io.BytesIO()
    try:
        pickle.dump(value, target)
    except Exception as failure:
        raise CollectiveError(
            f"An object that goes to other ranks has to be picklable; got {type(value)} and "
            f"{type(failure).__name__}: {failure}. Send its data instead: numbers, strings, lists, dicts or tensors."
        ) from failure
    return target.getbuffer()
