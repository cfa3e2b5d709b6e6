"""Which ranks come to an operation that one rank may also do alone, such as a save by the main process.

A rank that calls it cannot see where the others are: one may be on its way, or wait for the caller in an all-reduce. So
each rank has a thread that waits in the store of the process group, on a connection of its own, and answers there that
its rank does not come. The main thread is not needed for that: while it waits in a collective it holds no lock of
Python. An answer rests on evidence, and on no time limit:

- All ranks run one program. Where they call an operation together, each has begun as many frames (`transport.Place`) as
  the others, and as many collectives of each process group as the others of that group. A rank that has begun more than
  the caller is past the place of the call: what it began ends only with the caller's help. So is a rank that has begun
  more than another one that came or is past it, on a group of these two.
- torch counts the collectives of a group, so training pays nothing. On gloo its count includes what two ranks send each
  other. So what is begun since the last frame is compared, and where accel sends, as between stages of a pipeline, the
  whole counts as one operation (`transport.as_one`). A script's own sends on these groups must be as many on every
  rank. Watched are the default group and those that the strategy names. A group that a thread beside training uses must
  not be among them.
- A rank that leaves the process group, or ends, does not come. One that is killed cannot say so.
- A rank of which nothing is known is waited for, as long as the timeout of the process group.

Calls are numbered. To each every rank answers once, by calling or by its thread, and the last one to answer writes down
who was absent. So ranks agree on the number of the next call without having come to the last one. A call costs a rank a
few short requests to the store, and no collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public; its module does not list it

from accel_core._torch import connect_again, default_store
from accel_core.comm.disagreement import ranks_text
from accel_core.comm.transport import place_of
from accel_core.errors import RemoteRankError
from accel_core.process import world as process_world
from accel_core.process.world import World

__all__ = ["ELSEWHERE", "call", "start"]

ELSEWHERE = "is in another operation between ranks"
"""The reason of an absent rank that has begun a frame, so that the others can meet it there."""
_HERE = "is here"
_PAST = "has gone on to a later collective"
_ENDED = "has left the process group"
_SILENT = "gave no sign"
_ASK = "ask"
_STOP = "null"
_ABSENT = 2**32
"""What an absent rank adds to the number of answers, in which a rank that is here counts 1."""
_FOREVER = timedelta(days=3650)
_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks at this process while another rank waits for its answer."""
_LEAVING = 5.0
_ASKING = 2
"""How many ranks ask where the others are when they wait for long: two, as one may be the rank that is missed."""
_generations = itertools.count()


class _Stopped(Exception):
    """The thread has to end."""


class RollCall:
    """The calls of one process group, and the thread that answers them.

    Every rank makes it for the same process groups: the number of those made so far keeps their keys apart, as a store
    may outlive a process group.

    Attributes:
        missed: The kinds of calls that this rank did not come to because it had gone on.
    """

    def __init__(self, world: World) -> None:
        self.group = dist.group.WORLD
        self.place = place_of(self.group)
        self._rank, self._size = world.rank, world.size
        self._changed = threading.Condition()
        self._number = 0  # of the first call that this rank has not answered
        self._read = 0  # number of the first call that the thread has not done with
        self._awaited = ""  # the key that the thread waits for
        self._absent: dict[int, dict[int, str]] = {}
        self._closed: dict[int, str] | None = None  # what calls return that nobody answers any more
        self._stopped = False
        self._peers: frozenset[int] = frozenset()  # ranks with which this one is in smaller groups
        self.missed: set[str] = set()
        store: Any = default_store()
        stores = connect_again(store)
        if stores is None:
            self._closed = {}
            return
        prefix = f"accel/roll_call/{next(_generations)}"
        self._store: Any = PrefixStore(prefix, stores[0])
        self._listening = PrefixStore(prefix, stores[1])
        self._patience: timedelta = store.timeout
        self._listening.set_timeout(_FOREVER)
        self._thread = threading.Thread(target=self._listen, name="accel-roll-call", daemon=True)
        self._thread.start()
        process_world.before_leaving(self.stop)
        if self._rank < _ASKING:
            self.place.ask = self.missed_by

    def watch(self, group: dist.ProcessGroup) -> None:
        """Take what this rank begins on a further process group as evidence of where it is."""
        self.place.watch(group)
        if group.size() < self._size:
            self._peers |= {*dist.get_process_group_ranks(group)} - {self._rank}

    def missed_by(self, is_over: Callable[[], bool]) -> list[int]:
        """Return which ranks went past the frame that this one waits in, or left; none if the wait is over before."""
        answers: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):  # from a store that is gone
            number = self._begin(_ASK, self.place.before_frame(), is_over)
            with self._changed:
                while self._closed is None and number not in self._absent and not is_over():
                    self._changed.wait(_LONGEST)
                answers = self._absent.pop(number, {})
        return [rank for rank, word in answers.items() if word in (_PAST, _ENDED)]

    def _begin(
        self, kind: str, place: tuple[int, dict[str, int]] | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> int:
        """Answer the next call of a kind by being here, or at another place, and return its number; -1 once over."""
        # A rank that waits in a frame asks, and comes to no call meanwhile; who calls comes to no frame. So the first
        # one to use a number says which of the two it is, and who wants the other answers that it is elsewhere.
        while True:
            with self._changed:
                # What is written of a call is deleted when the next but one is answered: the thread has to be past it.
                self._wait_for(lambda: self._read >= self._number - 1)
                number = self._number
                fits = self._store.compare_set(f"{number}/kind", "", kind).decode() == kind
                if kind == _ASK and not fits:
                    # The frame may have ended, and this rank come to that call next: its thread knows.
                    if is_over():
                        return -1
                    self._changed.wait(_LONGEST)
                    continue
                self._number += 1
                self._changed.notify_all()
            self._answer(number, self._rank, _HERE if fits else ELSEWHERE, place)
            if fits:
                return number

    def is_passed(self, operation: str, kind: str) -> bool:
        """Return whether another rank has begun a collective that needs this one, instead of coming to the same call.

        Raises:
            RemoteRankError: Nothing was heard of a rank before the process group's timeout.
        """
        return _PAST in self.call(operation, kind).values()

    def call(self, operation: str, kind: str = "") -> dict[int, str]:
        """Wait until it is known of every rank whether it comes to the same call.

        Raises:
            RemoteRankError: Nothing was heard of a rank before the process group's timeout.
        """
        if self._closed is not None:
            return self._closed
        # Of its own kind: a rank that calls another operation does not come to this one.
        number = self._begin(kind or operation)
        with self._changed:
            self._wait_for(lambda: number in self._absent)
            absent = self._absent.pop(number, self._closed or {})
        silent = [rank for rank, word in absent.items() if word == _SILENT]
        if silent:
            raise RemoteRankError(
                f"{operation} was called on some ranks, and {ranks_text(silent)} neither came nor showed that they "
                f"will not; got no sign for {self._patience.total_seconds():.0f} s. Call it on all ranks, and let none "
                "work alone for longer."
            )
        return absent

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait for the thread; after the group's timeout, ranks that did not answer what it waits for are silent."""
        seconds = self._patience.total_seconds()
        while not self._changed.wait_for(lambda: self._closed is not None or is_there(), seconds):
            silent = [rank for rank in range(self._size) if not self._store.check([f"{self._read}/{rank}"])]
            self._write(self._read, dict.fromkeys(silent, _SILENT))

    def stop(self) -> None:
        """Answer for this rank that it comes to no further call, and end the thread."""
        if self._stopped or self._closed is not None:
            return
        with self._changed:
            self._stopped = True
            number, awaited = self._number, self._awaited
            self._changed.notify_all()
        # Where the store ended before this process, nobody asks.
        with contextlib.suppress(RuntimeError):
            self._answer(number, self._rank, _ENDED)
            if self._rank == 0:
                # The store may end with this process, and torch reports threads that wait in a store that ends.
                self._wake(number, _STOP)
                self._wake(number + 1, _STOP)
            if awaited:
                self._store.set(awaited, json.dumps({self._rank: _ENDED}))
        self._thread.join(_LEAVING)

    def _answer(self, number: int, rank: int, word: str, place: tuple[int, dict[str, int]] | None = None) -> None:
        place = place or self.place.now()
        self._store.set(f"{number}/{rank}", json.dumps((word, *place)))
        total = self._store.add(f"{number}/answers", 1 if word == _HERE else _ABSENT)
        absent, here = divmod(total, _ABSENT)
        if word == _HERE and here == 1:
            self._wake(number, json.dumps(place))
        if here and here + absent == self._size:
            self._conclude(number, absent)

    def _wake(self, number: int, content: str) -> None:
        """Give every thread what it waits for."""
        keys = [f"{number}/wake/{rank}" for rank in range(self._size)]
        if self._store.has_extended_api():
            self._store.multi_set(keys, [content] * self._size)
            return
        for key in keys:
            self._store.set(key, content)

    def _conclude(self, number: int, absent: int) -> None:
        """Write down who was absent, as the last to answer."""
        words = {rank: self._answer_of(number, rank)[0] for rank in range(self._size)} if absent else {}
        for rank, word in words.items():
            if word == _ENDED:
                self._answer(number + 1, rank, word)
        self._write(number, {rank: word for rank, word in words.items() if word != _HERE})
        # Everybody answered this call, so nobody waits for what was written of the last but one.
        for key in ("answers", "absent", "kind", *range(self._size)) if number > 1 else ():
            self._store.delete_key(f"{number - 2}/{key}")

    def _write(self, number: int, absent: dict[int, str]) -> None:
        """Write down who was absent; only what is written first counts."""
        # Set once more: the store that torch 2.6 and 2.7 have on loopback wakes nobody where it compares.
        self._store.set(f"{number}/absent", self._store.compare_set(f"{number}/absent", "", json.dumps(absent)))

    def _answer_of(self, number: int, rank: int) -> tuple[str, int, dict[str, int]]:
        """Return what a rank answered, and where it was: frames and collectives."""
        word, frames, begun = json.loads(self._store.get(f"{number}/{rank}"))
        return word, frames, begun

    def _listen(self) -> None:
        closed: dict[int, str] = {}
        try:
            for number in itertools.count():
                place = json.loads(self._wait(f"{number}/wake/{self._rank}"))
                if place is None:
                    closed = {0: _ENDED}
                    return
                self._store.delete_key(f"{number}/wake/{self._rank}")
                absent = json.loads(self._wait(f"{number}/absent")) if self._comes(number, *place) else None
                with self._changed:
                    if absent is not None:
                        self._absent[number] = {int(rank): word for rank, word in absent.items()}
                    self._read = number + 1
                    self._changed.notify_all()
        except (_Stopped, RuntimeError):
            # A store that is gone: with nobody to ask, ranks meet as if all had been called.
            return
        finally:
            with self._changed:
                self._closed = closed
                self._changed.notify_all()

    def _wait(self, key: str) -> bytes:
        with self._changed:
            if self._stopped:
                raise _Stopped
            self._awaited = key
        content: bytes = self._listening.get(key)
        with self._changed:
            self._awaited = ""
            if self._stopped:
                raise _Stopped
        return content

    def _comes(self, number: int, frames: int, begun: dict[str, int]) -> bool:
        """Return whether this rank came to a call; answer as soon as it is known that it does not come."""
        pause, waiting = _SHORTEST, self._peers
        passed = [(frames, begun)]
        while True:
            heard = {rank for rank in waiting if self._store.check([f"{number}/{rank}"])}
            waiting -= heard
            answers = [self._answer_of(number, rank) for rank in heard]
            passed += [(at, counts) for word, at, counts in answers if word in (_HERE, _PAST, ELSEWHERE)]
            with self._changed:
                if self._stopped:
                    raise _Stopped
                if self._number > number:
                    return True
                word = self._evidence(passed)
                if word:
                    self._number += 1
                    if word == _PAST:
                        self.missed.add(self._store.get(f"{number}/kind").decode())
                    break
                self._changed.wait(pause)
                pause = min(_LONGEST, 2 * pause)
        self._answer(number, self._rank, word)
        return False

    def _evidence(self, passed: list[tuple[int, dict[str, int]]]) -> str:
        """Return why this rank can no longer come to a call; an empty text while it can."""
        if not dist.is_initialized() or dist.group.WORLD is not self.group:
            return _ENDED
        own, counts = self.place.now()
        if any(own > frames for frames, _ in passed):
            return ELSEWHERE
        same = (begun for frames, begun in passed if frames == own)
        further = any(counts.get(name, 0) > count for begun in same for name, count in begun.items())
        return _PAST if further else ""


_current: RollCall | None = None


def start(world: World, groups: Iterable[Any] = ()) -> RollCall | None:
    """Let this process answer calls, from now until it leaves the process group."""
    global _current
    if world.size == 1 or not dist.is_available() or not dist.is_initialized():
        return None
    if _current is None or _current.group is not dist.group.WORLD:
        if _current is not None:
            _current.stop()
        _current = RollCall(world)
    for group in groups:
        _current.watch(group)
    return _current


def call(world: World, operation: str) -> dict[int, str]:
    """Wait until it is known of every rank whether it comes to the same call.

    Raises:
        RemoteRankError: Nothing was heard of a rank before the process group's timeout.
    """
    roll = start(world)
    return {} if roll is None else roll.call(operation)


def _forget() -> None:
    """Leave the thread and the store to the process that this one was forked from."""
    global _current
    if _current is not None:
        _current._stopped = True
    _current = None


os.register_at_fork(after_in_child=_forget)
