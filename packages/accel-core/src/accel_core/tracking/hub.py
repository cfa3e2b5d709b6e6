"""All trackers of a run in one object: their queues, the policy, the steps, and the end."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, TrackerError, expect
from accel_core.options.enums import LoggerType
from accel_core.tracking import discovery
from accel_core.tracking.discovery import Wanted, filter_trackers
from accel_core.tracking.handle import TrackerHandle, null_tracker
from accel_core.tracking.queues import MOST_WAITING, QUEUED, Call, TrackerQueue
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.snapshot import snapshot
from accel_core.tracking.steps import StepCounter, whole_step
from accel_core.tracking.tracker import GeneralTracker
from accel_core.tracking.undelivered import Undelivered

logger = logging.getLogger(__name__)

_Queues = Mapping[str, TrackerQueue]
_Kwargs = Mapping[str, Mapping[str, Any]]

_FLUSH_S = 1.0
_FILES = ("log_artifact", "log_artifacts")


class TrackerHub:
    """The trackers of one run.

    Logging calls return at once: a value is copied and put in each tracker's queue, as the module `queues` describes.
    What a tracker does not take is written to the logging directory, or to the working directory if there is none.

    Attributes:
        run_id: Identity of the run, kept over a resume; `None` before `init`.

    Raises:
        ConfigurationError: An unknown tracker, or one that needs a folder and has none.
        MissingDependencyError: A tracker's library is not installed.
    """

    def __init__(
        self,
        log_with: Wanted | Iterable[Wanted] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        is_main: bool = True,
        *,
        settings: TrackerKwargs | None = None,
    ) -> None:
        self.settings = settings if settings is not None else TrackerKwargs()
        self.logging_dir = logging_dir
        self.is_main = is_main
        self.log_with = log_with
        self._trackers: list[GeneralTracker] = []
        self.run_id: str | None = None
        self.running = False
        self._project = ""
        self._steps = StepCounter()
        self._resumed: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._queues: dict[str, TrackerQueue] = {}
        self._faces: dict[str, GeneralTracker] = {}
        self._undelivered = Undelivered(Path(), "", "")
        self._errors: list[TrackerError] = []
        self._warned_of_start = self._warned_of_vector = False

    @property
    def log_with(self) -> list[Any]:
        """What `init` starts, checked."""
        return self._log_with

    @log_with.setter
    def log_with(self, log_with: Wanted | Iterable[Wanted] | None) -> None:
        self._log_with = filter_trackers(log_with, self.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """After `init`, the tracker objects that were given, and a handle for each tracker that was named.

        On other ranks they are null trackers. In a list that is set here, a tracker that is left out gets no more
        calls, and is finished with the others; an object that is new joins the run, or begins one.
        """
        return self._trackers

    @trackers.setter
    def trackers(self, trackers: Iterable[GeneralTracker]) -> None:
        wanted = list(trackers)
        if self.is_main:
            known = {id(face): self._queues[name] for name, face in self._faces.items()}
            before, after = ({id(tracker) for tracker in listed} for listed in (self._trackers, wanted))
            for changed in (before ^ after) & known.keys():  # left out now, or in the list again
                known[changed].switched_off = changed in before
            for tracker in wanted:
                if id(tracker) not in known:
                    self._join(tracker)
        self._trackers = wanted

    def _join(self, tracker: GeneralTracker) -> None:
        """Let a tracker object take part from here on, in a run of its own where none is open."""
        if not self.running:
            self._open()
        self._add(_free_name(str(tracker.name), self._queues), tracker, {})
        self._wait_for_start()

    @property
    def failures(self) -> dict[str, str]:
        """The last error that each failing tracker raised, by the tracker's name; kept after the end."""
        return {name: queue.error for name, queue in self._queues.items() if queue.error is not None}

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker and store the configuration in it.

        A run that is open is finished first.

        Raises:
            OSError: The logging directory cannot be made.
            TrackerError: With the policy `raise`, a tracker did not start.
        """
        expect(isinstance(config, Mapping | None), config, "config maps names to values", 'Write config={"rate": 0.1}.')
        self.finish()
        wanted = _named(self.log_with)
        if not self.is_main:
            self._trackers = [null_tracker(_like(item)) for item in wanted.values()]
            return
        self._trackers = []
        if not wanted:
            return
        needs_folder = any(getattr(_like(item), "requires_logging_directory", False) for item in wanted.values())
        if needs_folder and self.logging_dir is not None:
            Path(self.logging_dir).mkdir(parents=True, exist_ok=True)
        self._project = str(project_name)
        self._open()
        for name, item in wanted.items():
            self._add(name, item, dict((init_kwargs or {}).get(name, {})))
        self._trackers = list(self._faces.values())
        self._wait_for_start()
        if config is not None:
            call = Call("store_init_configuration", (snapshot(dict(config)),), time=time.time())
            for queue in self._queues.values():
                self._put(queue, call)
        self._raise_pending()

    def _open(self) -> None:
        """Begin a run that is finished at the latest when the process ends."""
        self.run_id = self._resumed.get("run_id") or uuid.uuid4().hex[:12]
        self._queues, self._faces = {}, {}
        self._undelivered = Undelivered(Path(self.logging_dir or "."), self.run_id, self._project)
        self.running = True
        # Weak: a run that nobody holds any more need not live until then.
        atexit.register(_finish_at_exit, weakref.ref(self), os.getpid())

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker; returns at once.

        Raises:
            UnsupportedTypeError: The values are not a mapping.
            TrackerError: With the policy `raise`, a tracker failed in an earlier call.
        """
        fits = isinstance(values, Mapping)
        expect(fits, values, "Logged values map names to values", 'Write accelerator.log({"loss": loss}, step=step).')
        if self.running:
            wide = [name for name, value in values.items() if getattr(value, "ndim", 0) and len(value) > 1]
            if wide and not self._warned_of_vector:
                self._warned_of_vector = True
                self._warn("Curves are made of numbers; got several values as %r. Log their mean.", wide[0])
            self._log(self._queues, snapshot(dict(values)), step, log_kwargs or {})
            self._raise_pending()
        elif self._log_with and self.is_main and self.run_id is None and not self._warned_of_start:
            self._warned_of_start = True
            self._warn(
                "Values were logged before init_trackers, and are not stored; got %s. Call "
                'accelerator.init_trackers("my-project") first.',
                ", ".join(map(str, values)),
            )

    def log_at_last_step(self, values: Mapping[str, Any], step: int) -> None:
        """Log values at the step that was logged last, and at `step` where none was; it moves no counter of steps."""
        if self.running:
            last = self._steps.last if self._steps.last >= 0 else step
            self._put_values(self._queues, dict(values), last if self._steps.explicit else None, last, {})

    def get(self, name: str | LoggerType, unwrap: bool = False) -> Any:
        """Return a tracker by its name, a moment after it has what was logged before.

        Raises:
            ConfigurationError: The run has trackers, and no such one runs here.
        """
        wanted = _plain_name(name)
        if not (self.is_main and (self._faces or self.log_with)):
            like = discovery.LOGGER_TYPE_TO_CLASS.get(wanted, GeneralTracker)
            tracker = next((known for known in self._trackers if known.name == wanted), None) or null_tracker(like)
            return tracker.tracker if unwrap else tracker
        face = self._faces.get(wanted)
        if face is not None:
            self._deliver(self._queues[wanted])
            return face.tracker if unwrap else face
        raise ConfigurationError(
            f"No tracker {wanted!r} is running; running are {list(self._faces) or 'none'}. Name it in log_with and "
            "call init_trackers before get_tracker."
        )

    def finish(self) -> None:
        """Finish every tracker; a second call does nothing.

        Slow trackers are waited for no longer than `drain_seconds`, all together.

        Raises:
            TrackerError: With the policy `raise`, a tracker failed.
        """
        if not self.running:
            return
        deadline = time.monotonic() + self.settings.drain_seconds
        # All trackers are asked to end before any is waited for: their times run side by side.
        for queue in self._queues.values():
            queue.finish()
        for queue in self._queues.values():
            left = queue.close(max(0.0, deadline - time.monotonic()))
            if self.settings.policy != "off":
                self._undelivered.write(queue.name, left)
            self._undelivered.lost[queue.name] += queue.dropped
        self.running = False
        self._states = self.tracker_states
        self._tell_undelivered(self._undelivered)
        self._raise_pending()

    def _tell_undelivered(self, undelivered: Undelivered) -> None:
        if kept := _counted(undelivered.kept):
            self._warn("Calls that trackers did not take are in %s (%s).", undelivered.path, kept)
        if lost := _counted(undelivered.lost):
            why = undelivered.error or f"more than {MOST_WAITING} waited for a slow tracker"
            self._warn("Calls that trackers did not take are lost (%s): %s.", lost, why)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores so that another process goes on with this run, as JSON values."""
        return {
            "run_id": self.run_id,
            "project": self._project,
            "steps": self._steps.state_dict(),
            "trackers": self.tracker_states,
        }

    @property
    def tracker_states(self) -> dict[str, dict[str, Any]]:
        """What each tracker of the run stores of itself, by name; kept after the end."""
        states = {name: each.state for name, each in self._queues.items() if each.tracker is not None}
        return {**self._resumed.get("trackers", {}), **self._states, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that a checkpoint stored: its id, its steps, its runs in the trackers' libraries.

        It can be called before `init` or after it; after it, the trackers switch to the stored runs in their threads.
        """
        self._steps.load_state_dict(state["steps"])
        self._resumed = {"run_id": state["run_id"], "trackers": dict(state["trackers"])}
        if not self.running:
            return
        self.run_id = state["run_id"] or self.run_id
        for name, queue in self._queues.items():
            queue.put(Call("load_state_dict", (self._state_for(name),)))

    def _state_for(self, name: str) -> dict[str, Any]:
        """Return the stored state of one tracker, with the step at which the run was left."""
        return {**self._resumed["trackers"].get(name, {}), "step": self._steps.last}

    def _add(self, name: str, item: Wanted, kwargs: dict[str, Any]) -> None:
        state = self._state_for(name) if self._resumed else None
        project, logging_dir = self._project, self.logging_dir
        like = _like(item)
        kind: type[Any] = like if isinstance(like, type) else type(like)

        def make() -> GeneralTracker:
            made: GeneralTracker
            if isinstance(item, GeneralTracker):
                made = item
            elif getattr(kind, "requires_logging_directory", False):
                made = kind(project, logging_dir, **kwargs)
            else:
                made = kind(project, **kwargs)
            if state is not None:
                made.load_state_dict(state)
            return made

        queue = TrackerQueue(name, kind, make, self._on_error)
        self._queues[name] = queue
        handle: Any = TrackerHandle(queue, self._send, self._deliver)
        self._faces[name] = item if isinstance(item, GeneralTracker) else handle
        queue.start()

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        for name, queue in self._queues.items():
            if queue.drain(max(0.0, deadline - time.monotonic())):
                queue.adopt_context()
            else:
                self._warn(
                    "The tracker %r did not start within %g s; the run continues, and its logged values wait for the "
                    "tracker.",
                    *(name, self.settings.start_seconds),
                )

    def _deliver(self, queue: TrackerQueue) -> None:
        """Wait a moment until a tracker has what was logged before."""
        if self.running:
            queue.drain(_FLUSH_S)

    def _send(self, queue: TrackerQueue, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call made on one tracker's handle."""
        if not self.running or queue is not self._queues.get(queue.name):
            logger.warning("%s of the tracker %r came after the end of its run and is not logged.", method, queue.name)
            return
        args, kwargs = snapshot(args), snapshot(kwargs)
        if method == "log":
            values, step, more = _log_arguments(*args, **kwargs)
            self._log({queue.name: queue}, dict(values), step, {queue.name: more})
        else:
            self._put(queue, Call(method, args, kwargs, time=time.time()))
            if method in _FILES and not queue.late:  # its owner may remove the file when this returns
                queue.late = not queue.drain(self.settings.drain_seconds)
        self._raise_pending()

    def _log(self, queues: _Queues, values: dict[str, Any], step: object, kwargs: _Kwargs) -> None:
        for given, filled, names in self._steps.place(values, whole_step(step)):
            self._put_values(queues, {name: values[name] for name in names}, given, filled, kwargs)

    def _put_values(
        self, queues: _Queues, values: dict[str, Any], given: int | None, filled: int, kwargs: _Kwargs
    ) -> None:
        now = time.time()
        for name, queue in queues.items():
            step = filled if queue.kind.fills_step else given
            self._put(queue, Call("log", (values,), {"step": step, **kwargs.get(name, {})}, filled, now))

    def _put(self, queue: TrackerQueue, call: Call) -> None:
        if not queue.switched_off and not queue.put(call) and queue.dropped == 1:
            self._warn(
                "The queue of the tracker %r is full, and what is logged is lost to it until it has room; got %d calls "
                "that wait. Find out why the tracker is slow, or log less.",
                *(queue.name, MOST_WAITING),
            )

    def _on_error(self, queue: TrackerQueue, call: Call, error: BaseException) -> None:
        """Keep a call that raised, and do what the policy says; runs in the tracker's thread."""
        name, policy = queue.name, self.settings.policy
        if policy == "off":
            queue.switched_off = True
            return
        if call.method in QUEUED:
            self._undelivered.write(name, [call])
        if policy == "raise" and (queue.tracker is not None or call.method == "start"):
            raised = TrackerError(
                f"The tracker {name!r} failed in `{call.method}`; it raised {queue.error}. Repair it, or let runs "
                "survive it with TrackerKwargs(policy='warn')."
            )
            raised.__cause__ = error
            self._errors.append(raised)
        elif policy == "warn" and queue.failures == 1:
            logger.warning(
                "The tracker %r failed in `%s` (%s); the run continues. What it does not take is written to %s.",
                *(name, call.method, queue.error, self._undelivered.path),
            )

    def _raise_pending(self) -> None:
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def _warn(self, message: str, *facts: object) -> None:
        if self.settings.policy != "off":
            logger.warning(message, *facts)


def _named(log_with: Iterable[Wanted]) -> dict[str, Wanted]:
    """Return what was asked for by names of its own."""
    named: dict[str, Wanted] = {}
    for item in log_with:
        named[_free_name(_plain_name(item.name if isinstance(item, GeneralTracker) else item), named)] = item
    return named


def _free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name that no other tracker has: the second of a name is `name#2`."""
    names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(free for free in names if free not in taken)


def _plain_name(name: str | LoggerType) -> str:
    return str(name.value) if isinstance(name, LoggerType) else str(name)


def _like(item: Wanted) -> type[GeneralTracker] | GeneralTracker:
    """Return the tracker that was given, or the class of the one that was named."""
    return item if isinstance(item, GeneralTracker) else discovery.LOGGER_TYPE_TO_CLASS[_plain_name(item)]


def _log_arguments(
    values: Mapping[str, Any], step: object = None, **kwargs: object
) -> tuple[Mapping[str, Any], object, dict[str, object]]:
    """Take the arguments of a tracker's `log` apart: the values, the step, and what is for the library."""
    return values, step, kwargs


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def _finish_at_exit(reference: weakref.ref[TrackerHub], pid: int) -> None:
    """Finish a run that its script left open; a forked child has none of its threads and leaves it alone."""
    hub = reference()
    if hub is not None and os.getpid() == pid:
        hub.finish()
