"""The replicas of a run: who is there, what a step averages over them, and whether it is made on all of them.

A step goes so on every replica: `meet` agrees on who takes part, and heals who came; `averaging` tells each other what
was read, and averages gradients; `commit` decides. What goes wrong meanwhile leaves the step unmade, and its samples
unread. torchft agrees, connects and sends states; which samples are whose, and what a step is worth, is decided here.

After a step that was made, `meet` only asks who takes part in the next one, and a batch is read as if nobody came or
left. The answer is looked at before gradients are averaged; where somebody did, this step is not made by anybody.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, Work

from accel_core.comm.control import Channel
from accel_core.errors import StateError, undone_by
from accel_core.host import environ
from accel_core.logging import get_logger
from accel_core.options.engines import load
from accel_core.process.store import loopback_store
from accel_core.process.world import World
from accel_torchft.average import Average
from accel_torchft.kwargs import FaultToleranceKwargs
from accel_torchft.notes import Notes

_logger = get_logger(__name__)
_CLOSING, _VOID = -1, -2  # where a replica stands that ends an epoch, or whose batch was divided for others
_COLUMNS = 5  # what a replica tells: its history, the weight of its samples, its number, where it stands, since when
_CONNECT = 2.0  # seconds for connections, in which one that died is waited for; doubled where they fail
_PAUSE, _LOOK, _NOTE = 0.2, 0.02, 1.0
_RETRIES = 20  # of asking a lighthouse that does not answer, as one that is started again


class QuorumLost(Exception):  # it ends the script in good order
    """Fewer replicas than the minimum were there for longer than a run waits."""


class Replicas:
    """The copies of a run that train with it, each on its own processes; this is one of them.

    Attributes:
        number: Which one this is, from 0.
        size: How many the run was started with.
        life: How many times this one was started before.
        living: Numbers of those that took part in the last step, in their order.
        step: Number of steps that were made.
        lost_steps: Steps that were not made, because a replica left on the way; their samples were read again.
        samples: Samples that all steps were made of.
        waited: Seconds for which the last change of `living` held this replica up.
        is_decided: Whether it is known of the present step that it is made, or that it is not.
    """

    def __init__(
        self,
        settings: FaultToleranceKwargs,
        world: World,
        capture: Callable[[], Any],
        restore: Callable[[Any], None],
        follow: Callable[[], None],
        speak: Callable[[bool], None],
    ) -> None:
        self.number = environ.integer("ACCEL_REPLICA", 0) or 0
        self.size = environ.integer("ACCEL_REPLICA_COUNT", 1) or 1
        self.life = environ.integer("ACCEL_REPLICA_LIFE", 0) or 0
        self.living: list[int] = []
        self.step, self.lost_steps, self.samples, self.waited = 0, 0, 0.0, 0.0
        self.place = (0, 1)  # of this replica among those that meet
        self.skipped = 0  # epochs that others had read before this replica came
        self.is_behind = False  # it took over a state, and passes epochs until it is there
        self._is_fresh, self.healed = True, False
        self._settings, self._world, self._noted_at = settings, world, 0.0
        self._fewest = settings.min_replicas or environ.integer("ACCEL_REPLICA_MIN", 1) or 1
        self._channel = Channel(world, "replicas")
        self.notes = Notes(environ.text("ACCEL_REPLICA_STORE") or "")
        self._hosts = (environ.text("ACCEL_REPLICA_HOSTS") or "127.0.0.1").split(",")  # this machine's first
        self._manager: Any = None
        self._group: Any = None
        self._store: Any = None
        self._transport: Any = None
        self._told: list[list[int]] = []
        self._chain, self._since, self._made_at = 0, 0, time.monotonic()
        self._averaged, self.is_decided = False, False
        self._average = Average(self._send, self._arrived, self._wait_for_share)
        self._table: tuple[torch.Tensor, Work | None] | None = None
        self._weight: float = 0.0
        self._asker = ThreadPoolExecutor(1, "replicas")
        self._asked: Future[None] | None = None
        self._limit = _CONNECT
        self._asked_at = 0.0
        self._is_steady = False  # whether the next step will likely be made by those that made the last one
        self._rests = threading.Event()  # whether the state may be sent
        self._held: Any = None  # a state that was received
        # The state; what follows each step; whether this replica speaks for the run.
        self._capture, self._restore, self._follow, self._speak = capture, restore, follow, speak
        self.has_changed = self._is_new = self._is_made = False
        if not settings.heal:
            self.notes.write(f"stays-away-{self.number}")

    @property
    def is_connected(self) -> bool:
        """Whether this replica takes part, or is only about to come."""
        return self._manager is not None

    def meet(self, ahead: bool = False) -> None:
        """Agree with the replicas that are there on who takes part in the next step; heal if this one came late.

        Args:
            ahead: Whether the answer may be looked at later, after a step that was made.

        Raises:
            QuorumLost: Too few are there.
        """
        self._averaged, self.is_decided, self.healed = False, False, False
        if self._asked is not None and self._channel.any(not self._is_as_before()):  # of a step that was not begun
            self._give_up("a loop was broken off")
        now = time.monotonic()
        if ahead and self._is_steady:
            self._asked_at, self._asked = now, self._asker.submit(self._ask, self._settings.quorum_timeout)
            return
        deadline = (self._asked_at or now) + self._settings.quorum_timeout
        while not self._met(deadline):
            time.sleep(_PAUSE)
        if self._is_fresh and not self.healed and self._channel.broadcast(self._is_late()):
            raise QuorumLost("no replica is left whose state could be taken over")
        self._is_fresh, self._is_steady, self._asked_at, self._limit = False, True, 0.0, _CONNECT

    def _ask(self, seconds: float) -> None:
        """Ask who takes part, and be connected to them; a thread begins on the first device."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)
        self._manager.start_quorum(timeout=timedelta(seconds=seconds))

    def _is_as_before(self) -> bool:
        """Return whether the same replicas as before take part, as far as was asked ahead."""
        asked, self._asked = self._asked, None
        if asked is None:
            return True
        manager = self._manager
        self._rests.set()
        try:
            has_failed = asked.exception() is not None  # which meeting in the foreground tells
        finally:
            self._rests.clear()
        if self._channel.any(has_failed):
            self.leave()
            return False
        if manager.errored() is not None:
            self._fail(manager.errored())
            return False
        self._asked_at = 0.0
        before, self.place = self.place, (manager.participating_rank(), manager.num_participants())
        return self._held is None and self.place == before

    def _is_late(self) -> bool:
        """Return whether others trained without this replica, which has the weights of the start."""
        return self.step == 0 and bool(self.skipped or self.notes.has("finished"))

    def _await_start(self) -> None:
        """Wait for those that start together, so that none has trained for long before another one comes."""
        self.notes.write(f"here-{self.number}")
        deadline = time.monotonic() + self._settings.quorum_timeout
        others = [f"here-{number}" for number in range(self.size)]
        while self._world.rank == 0 and not self.notes.has(*others) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        self._channel.broadcast(0)

    def _met(self, deadline: float) -> bool:
        """Try once; where too few came, or the connection failed, there is another try."""
        left = deadline - time.monotonic()
        failure = nobody = f"fewer than {self._fewest} of {self.size} came in {self._settings.quorum_timeout:g} s"
        is_asked, held = False, None
        if left > 0:
            try:
                manager = self._manager or self._connect(left)
                if self._world.device.type != "cuda":  # where exchanges have the same limit
                    self._group.set_timeout(timedelta(seconds=min(self._limit, self._settings.timeout)))
                self._rests.set()
                self._ask(left)
                is_asked, failure = True, str(manager.errored() or "")
                held, self._held = self._held, None
            except TimeoutError:
                failure = nobody
            except (RuntimeError, ConnectionError) as error:
                failure = f"{type(error).__name__}: {error}"
            finally:
                self._rests.clear()
        if held is not None:
            self._restore(held)  # an error ends this replica: tried again, it would lose the others step after step
        told = self._channel.exchange((failure, is_asked, len(self.living), self.notes.has("finished")))
        failures = [each for each, *_ in told if each]
        if failures and deadline <= time.monotonic():
            raise QuorumLost(failures[0])
        if failures:
            self._limit *= 2
            if all(each[1] for each in told):
                self._give_up(failures[0])
            else:  # torchft's manager would give the same answer again
                self.leave()
            return False
        self.place = manager.participating_rank(), manager.num_participants()
        *_, before, finished = told[0]
        if finished and self.place[1] < before:
            raise QuorumLost("the others came to the end of the script")
        return bool(self.place[1] >= self._fewest)

    def _give_up(self, why: str) -> None:
        """Leave a step, so that the others need not wait for this replica in it."""
        if self._manager is None:
            return
        if self._manager.errored() is None:
            self._manager.report_error(RuntimeError(why))
        with suppress(RuntimeError):
            self._group.abort()
        with suppress(RuntimeError, TimeoutError):
            self._manager.should_commit()

    def _connect(self, left: float) -> Any:
        """Join the quorum's servers, with a meeting point of this replica's own processes."""
        # Where a run has replicas, and not earlier.
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # leaving is expected
        timeout = timedelta(seconds=self._settings.timeout)
        if self._world.rank == 0 and self._store is None:
            self._store = loopback_store(0, timeout, self._hosts[0])
        port = self._channel.broadcast(0 if self._store is None else self._store.port)
        limit = timedelta(seconds=min(left, self._limit, self._settings.timeout))
        on_gpu = self._world.device.type == "cuda"
        if on_gpu:  # else torch ends this process for an error of NCCL, as when another replica dies
            environ.write("TORCH_NCCL_ASYNC_ERROR_HANDLING", 0)
        self._group = ProcessGroupNCCL(timeout) if on_gpu else ProcessGroupGloo(limit)
        if self._transport is None:
            self._transport = load("accel_torchft.transport:Transport")(timeout, self._hosts)
        self._manager = Manager(
            pg=self._group,
            state_dict=self._at_rest,
            load_state_dict=lambda found: setattr(self, "_held", found),
            min_replica_size=self._fewest,
            use_async_quorum=False,  # whose samples are whose is known before they are read
            timeout=timeout,
            quorum_timeout=timedelta(seconds=self._settings.quorum_timeout),
            connect_timeout=limit,
            rank=self._world.rank,
            world_size=self._world.size,
            store_addr=self._hosts[0],
            store_port=port,
            hostname=self._transport.host,
            quorum_retries=_RETRIES,
            replica_id=f"replica{self.number}",
            checkpoint_transport=self._transport,
        )
        self._show_step()
        atexit.register(self.leave)
        if self._is_fresh and self.life == 0:
            self._await_start()
        return self._manager

    def _show_step(self) -> None:
        """Tell torchft where this replica stands: those that are furthest heal the others.

        Before the first step one alone is furthest, as otherwise processes of one replica would be healed from several.
        """
        step = self.step + self.size - self.is_behind if self.step else self.size - self.number
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def leave(self) -> None:
        """Take part no more, until the next `meet`."""
        manager, self._manager, self._asked, self._is_steady = self._manager, None, None, False
        if manager is not None:
            atexit.unregister(self.leave)
            with suppress(RuntimeError):
                self._group.abort()
            manager.shutdown(wait=False)
            self._transport = None

    def _at_rest(self) -> Any:
        """Return the state where nothing changes it; called by a thread that asks who takes part."""
        if not self._rests.wait(self._settings.timeout):
            raise TimeoutError("a state is sent between two steps; none ended in time")
        # torchft calls this, and copies to the CPU, on streams of its own.
        self._world.hardware.synchronize()
        found = self._capture()
        self._world.hardware.synchronize()
        return found

    @contextmanager
    def averaging(
        self, parameters: Sequence[torch.nn.Parameter], weight: float, where: int, *, early: bool = False
    ) -> Iterator[None]:
        """Average gradients over the replicas of this step after a block, each by the weight of its samples.

        Args:
            parameters: Whose gradients.
            weight: Of the samples of this replica.
            where: Position after the last step, the same on all replicas.
            early: Whether the block is a backward pass that leaves whole gradients, which may be sent while it runs.

        Raises:
            StateError: The step was made already.
        """
        if self.is_decided:
            raise StateError(
                "Replicas make one step of a batch, after all its backward passes; got a backward pass after an "
                "optimizer's step. Call accelerator.backward for all losses first, and then the optimizers."
            )
        self._averaged, self._weight = True, weight
        is_alone = self.place[1] == 1
        self._average.lay_out(parameters, early and not is_alone)
        self._tell(where if self._is_as_before() else _VOID)

        def give_up() -> None:
            self._average.stop()
            self._fail(RuntimeError("a backward pass failed"))

        with undone_by(give_up):
            yield
        if self._heard() is not None and not is_alone:
            self._average.finish()
        if self._average.was_early:
            self._manager.report_error(RuntimeError("a gradient came in parts; from now on it is sent later"))

    def _send(self, tensor: torch.Tensor) -> Work | None:
        """Begin to add up a tensor over replicas; `None` where the step is lost."""
        if self._manager is not None and self._manager.errored() is None:
            try:
                options = AllreduceOptions()
                options.timeout = timedelta(seconds=self._settings.timeout)
                work: Work = self._group.allreduce([tensor], options)
                return work
            except (RuntimeError, AssertionError) as error:  # the second where connections were closed meanwhile
                self._fail(error)
        return None

    def _arrived(self, work: Work | None) -> bool:
        """Wait for an exchange."""
        if work is None:
            return False
        try:
            work.wait()
            broken = self._group.errored()  # NCCL's wait ends at once, and one that is given up raises nothing
        except RuntimeError as error:
            broken = error
        if broken is not None:
            self._fail(broken)
        return self._manager.errored() is None

    def _fail(self, error: BaseException) -> None:
        """Lose the step, and close this replica's connections: others may still be waiting."""
        if self._manager is not None:
            self._manager.report_error(error)
            with suppress(RuntimeError):
                self._group.abort()

    def _tell(self, where: int) -> None:
        """Begin to tell the others what this replica stands for."""
        rank, count = self.place
        self._told = []
        table = torch.zeros(count, _COLUMNS, dtype=torch.int64)
        own = self._chain ^ self._average.form, _bits(self._weight), self.number, where, self._since
        table[rank] = torch.tensor(own)
        sent = table.to(self._world.device)
        self._table = sent, self._send(sent)

    def _heard(self) -> list[list[int]] | None:
        """Return what each told, or `None` where the step is lost."""
        table, self._table = self._table, None
        if table is not None and self._arrived(table[1]):
            rows = self._told = table[0].tolist()
            stands = [(row[0], row[3]) for row in rows]
            if len({*stands}) > 1 or _VOID in {row[3] for row in rows}:
                self._manager.report_error(RuntimeError("replicas stand at different places, or have other histories"))
                most = max(stands, key=stands.count)  # of equals, the first
                if min(place for _, place in stands) >= 0 and stands[self.place[0]] != most:
                    # Others went on without this one, or otherwise: it takes over their state.
                    self._manager.load_state_dict({"step": 0, "batches_committed": 0})
        return self._told if self._told and self._manager.errored() is None else None

    def _wait_for_share(self) -> float | None:
        """Return what this replica counts among all, or `None` where the step is lost."""
        rows = self._heard()
        total = 0.0 if rows is None else math.fsum(_number(row[1]) for row in rows)
        return None if rows is None else self._weight / total if total else 0.0

    def commit(self) -> bool:
        """Return whether the step is made; the same for all optimizers, and on all processes of this replica."""
        if not self._averaged:
            return True
        if not self.is_decided:
            self.is_decided = True
            self._is_made = self._is_steady = self._manager is not None and self._should_commit()
            if self._is_made:
                self._make()
            else:
                self.lost_steps += 1
                why = "nobody answered" if self._manager is None else self._manager.errored()
                _logger.info("A step is not made, and its samples are read again: %s", why)
        return self._is_made

    def _should_commit(self) -> bool:
        """Return whether the step is to be made; with no answer in time, as of a process that was stopped, it is not.

        Raises:
            TimeoutError: Other processes of this replica may have got an answer.
        """
        try:
            return bool(self._manager.should_commit())
        except TimeoutError:
            if self._world.size > 1:
                raise
            self.leave()  # where the others made the step, this replica takes over their state
            return False

    def close(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Make sure that all replicas are at the end of the epoch; return whether this one may go on after it."""
        self._weight, self._is_steady = 0.0, False
        self._average.lay_out(parameters, early=False)
        self._tell(_CLOSING)
        rows = self._heard()
        apart = self._channel.any(any(row[3] >= 0 for row in self._told))
        if self._should_commit() and rows is not None:
            self._advance()
            return True
        if apart:  # the others are further: this one comes back where they are, and takes over their state once more
            self.is_behind = True  # epochs that pass by until then move generators of random numbers
            self.leave()
        return apart

    def _make(self) -> None:
        self.samples += math.fsum(_number(row[1]) for row in self._told)
        self._advance()
        self.has_changed, self._is_new = self._is_new, False
        if self.has_changed:
            self.waited = time.monotonic() - self._made_at
            if self._world.is_main:
                self.notes.log(when=time.time(), living=self.living, step=self.step, waited=self.waited)
        self._made_at = time.monotonic()
        self.note()
        self._follow()

    def _advance(self) -> None:
        """Add a step to the history, which tells apart steps of the same number that other replicas made."""
        words = struct.pack(f"<{1 + 2 * len(self._told)}q", self._chain, *(v for row in self._told for v in row[1:3]))
        self._chain = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        self.step += 1
        self.is_behind = False
        self._show_step()
        # One that came later lacks what scripts keep in variables of their own, as a count of steps.
        _, speaker = min((row[4], row[2]) for row in self._told)
        self._speak(speaker == self.number)
        living = sorted(row[2] for row in self._told)
        if living != self.living:
            self.living, self._is_new = living, True

    def history(self) -> dict[str, Any]:
        """Return what of the history a replica that comes takes over."""
        late = self._is_fresh and self._is_late()
        return {"chain": self._chain, "samples": self.samples, "step": self.step, "late": late}

    def take_history(self, state: dict[str, Any]) -> None:
        """Take over the history of another replica.

        Raises:
            StateError: That one came late itself, and has no more than the weights of the start.
        """
        if state["late"]:
            raise StateError("The state of a living replica is taken over; got one that came late itself. Start again.")
        self._chain, self.samples, self.step = state["chain"], state["samples"], state["step"]
        self._since = self.step
        self.healed, self.is_behind = True, False

    def note(self, trains: bool = True) -> None:
        """Let the launcher know that this life has made steps, and, once a second, that it makes more."""
        now = time.monotonic()
        if self._world.rank == 0 and self.living and (not trains or now > self._noted_at + _NOTE):
            self._noted_at = now if trains else 0.0
            limit = self._settings.quorum_timeout + self._settings.timeout
            self.notes.write(f"at-{self.number}", f"{self.life} {limit:g} {self.step if trains else '-'}")

    def is_left_behind(self) -> bool:
        """Return whether others made steps without this one, as while it was stopped; the same on all processes."""
        others = (self.notes.read(f"at-{each}", "- 0 -") for each in range(self.size) if each != self.number)
        steps = (int(step) for *_, step in map(str.split, others) if step != "-")
        return self._channel.broadcast(self._world.rank == 0 and any(step > self.step for step in steps))

    def publish(self, epochs: dict[int, int]) -> None:
        """Let replicas that come know which epochs are over."""
        if self._world.is_main:
            self.notes.write("epochs", json.dumps(epochs))

    def published(self, loader: int) -> int:
        """Return which epoch of a loader the living read, as far as is known; the same on all processes."""
        epochs: dict[str, int] = json.loads(self.notes.read("epochs", "{}")) if self._world.rank == 0 else {}
        return self._channel.broadcast(epochs.get(str(loader), 0))

    def first_to(self, what: str) -> bool:
        """Return whether this is the first replica to do something; the same on all processes."""
        return self._channel.broadcast(self._world.rank == 0 and self.notes.first_to(what))


def _bits(value: float) -> int:
    """Return a number as the integer with the same bits: integers travel exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
