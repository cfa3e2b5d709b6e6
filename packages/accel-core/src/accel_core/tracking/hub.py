"""All trackers of a run behind one object: queues, policy, steps, and the record of what they did not take."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, StateError, TrackerError, expect
from accel_core.options.enums import LoggerType
from accel_core.tracking import discovery
from accel_core.tracking.discovery import Wanted, filter_trackers
from accel_core.tracking.handle import TrackerHandle
from accel_core.tracking.null import null_tracker
from accel_core.tracking.recording import Recorder, recorder_for
from accel_core.tracking.session import Call, TrackerSession, describe_error
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.snapshot import snapshot
from accel_core.tracking.steps import StepCounter, whole_step
from accel_core.tracking.tracker import GeneralTracker
from accel_core.tracking.worker import Job, TrackerWorker

__all__ = ["TrackerHub"]

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0
_FILES = {"log_artifact": "local_path", "log_artifacts": "local_dir"}


class TrackerHub:
    """The trackers of one run.

    Logging calls return at once: a value is copied and queued, and a thread hands it to the recorder and to each
    tracker's own thread. With accel-trackers installed, what a tracker fails to take stays in the spool; the settings
    say what else happens.

    Attributes:
        run_id: Identity of the run, kept over a resume; `None` before `init`.

    Raises:
        ConfigurationError: An unknown tracker, or one that needs a folder and has none.
        MissingDependencyError: A tracker's library is not installed, or a spool is asked for and nothing writes it.
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
        self._sessions: dict[str, TrackerSession] = {}
        self._faces: dict[str, GeneralTracker] = {}
        self._distributor: TrackerWorker | None = None
        self._recorder: Recorder | None = None
        self._seq = 0
        self._errors: list[TrackerError] = []
        self._warned_of_start = self._warned_of_fork = self._warned_of_vector = False
        self._pid = 0

    @property
    def log_with(self) -> list[Any]:
        """What `init` starts, checked."""
        return self._log_with

    @log_with.setter
    def log_with(self, log_with: Wanted | Iterable[Wanted] | None) -> None:
        self._log_with = filter_trackers(log_with, self.logging_dir)
        if self._log_with:
            recorder_for(self.settings)  # a spool that nothing installed can write is refused at once

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
        wrong = [type(tracker).__name__ for tracker in wanted if not isinstance(tracker, GeneralTracker)]
        if wrong:
            raise ConfigurationError(
                f"A run logs to objects of a GeneralTracker's class; got {', '.join(wrong)}. Derive it from "
                "accel_core.tracking.tracker.GeneralTracker."
            )
        if self.is_main:
            known = {id(face): self._sessions[name] for name, face in self._faces.items()}
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
            self._open([str(tracker.name)])
        name = str(tracker.name)
        same = sum(known.partition("#")[0] == name for known in self._sessions)
        self._add(f"{name}#{same + 1}" if same else name, tracker, {})
        self._wait_for_start()

    @property
    def spool_path(self) -> Path | None:
        """The spool file of the run, or `None` where none is written."""
        return self._recorder.path if self._recorder is not None else None

    @property
    def failures(self) -> dict[str, str]:
        """The last error that each failing tracker raised, by the tracker's name; kept after the end."""
        return {name: session.error for name, session in self._sessions.items() if session.error is not None}

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker and store the configuration in it.

        A run that is open is finished first.

        Raises:
            ConfigurationError: The logging directory cannot be written.
            TrackerError: With the policy `raise`, a tracker did not start.
        """
        fits = config is None or isinstance(config, Mapping)
        expect(fits, config, "config maps names to values", 'Write for example config={"rate": 0.1}.')
        self.finish()
        wanted = _named(self.log_with)
        if not self.is_main:
            self._trackers = [null_tracker(_like(item)) for item in wanted.values()]
            return
        self._trackers = []
        if not wanted:
            return
        self._check_folder(wanted)
        self._project = str(project_name)
        self._open(wanted)
        for name, item in wanted.items():
            self._add(name, item, dict((init_kwargs or {}).get(name, {})))
        self._trackers = list(self._faces.values())
        self._wait_for_start()
        if self._resumed:
            self._take_over()
        if config is not None:
            self._emit("config", {"values": snapshot(dict(config))}, None)
        self._raise_pending()

    def _open(self, names: Iterable[str]) -> None:
        """Begin a run that is finished at the latest when the process ends."""
        self.run_id = self._resumed.get("run_id") or uuid.uuid4().hex[:12]
        self._sessions, self._faces = {}, {}
        self._distributor, self._pid = TrackerWorker("tracker-queue"), os.getpid()
        recorder = recorder_for(self.settings)
        if recorder is not None:
            run = {"run_id": self.run_id, "project": self._project, "trackers": list(names)}
            self._recorder = recorder(self.settings.spool_folder(self.logging_dir), run)
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
            ConfigurationError: The values are not a mapping.
            TrackerError: With the policy `raise`, a tracker failed in an earlier call.
        """
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"Logged values are a mapping from names to values; got {type(values).__name__}. "
                'Write for example accelerator.log({"loss": loss}, step=step).'
            )
        if self.running:
            if not self._warned_of_vector:
                wide = [name for name, value in values.items() if getattr(value, "ndim", 0) and len(value) > 1]
                self._warned_of_vector = bool(wide)
                if wide:
                    self._warn("Curves are made of numbers; got several values as %r. Log their mean.", wide[0])
            kwargs = {name: dict(given) for name, given in (log_kwargs or {}).items()}
            self._log(snapshot(dict(values)), step, kwargs, None)
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
            entry = {"step": last if self._steps.explicit else None, "filled": last, "time": time.time()}
            self._emit("log", {**entry, "values": dict(values), "kwargs": {}}, None)

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
            self._deliver(self._sessions[wanted])
            return face.tracker if unwrap else face
        running = list(self._faces)
        raise ConfigurationError(
            f"No tracker {wanted!r} is running; running are {running or 'none'}. Name it in log_with and call "
            "init_trackers before get_tracker."
        )

    def finish(self) -> None:
        """Finish every tracker; a second call does nothing.

        Slow trackers and a disk that hangs are waited for no longer than `drain_seconds`, all together.

        Raises:
            TrackerError: With the policy `raise`, a tracker failed.
        """
        if not self.running:
            return
        deadline = time.monotonic() + self.settings.drain_seconds
        assert self._distributor is not None, "a run that is open has its queue"
        self._distributor.finish(lambda: None)
        self._distributor.close(self.settings.drain_seconds)
        # All trackers are told to end before anybody is waited for: their time and the disk's run side by side.
        for session in self._sessions.values():
            session.finish()
        recorder = self._recorder
        written = recorder is not None and recorder.drain(max(0.0, deadline - time.monotonic()))
        for session in self._sessions.values():
            done = session.close(max(0.0, deadline - time.monotonic()))
            if session.dropped or not done:
                self._warn(
                    "The tracker %r did not take everything within %g s; %d entries are not sent, %d of them as its "
                    "queue was full.",
                    *(session.name, self.settings.drain_seconds, len(session.unsent), session.dropped),
                )
        self.running, self._recorder = False, None
        self._states = self.tracker_states
        unsent = {name: frozenset(session.unsent) for name, session in self._sessions.items() if session.unsent}
        if recorder is not None:
            recorder.write({"kind": "end", "time": time.time()})
            # A disk that kept up gets a moment also where a tracker used all the time: it has only the end to write.
            seconds = max(deadline - time.monotonic(), _FLUSH_S if written else 0.0)
            recorder.close(unsent, keep=self.settings.keep_spool, seconds=seconds, quiet=self.settings.policy == "off")
        elif unsent:
            self._warn(
                "Entries that trackers failed to store are lost (%s). Install accel-trackers, which keeps them "
                "until they are sent.",
                ", ".join(f"{name}: {len(numbers)}" for name, numbers in unsent.items()),
            )
        self._raise_pending()

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
        states = {name: each.state for name, each in self._sessions.items() if each.tracker is not None}
        return {**self._resumed.get("trackers", {}), **self._states, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that a checkpoint stored: its id, its steps, its runs in the trackers' libraries.

        It can be called before `init` or after it; after it, the trackers switch to the stored runs in their threads.
        """
        missing = sorted({"run_id", "steps", "trackers"} - set(state))
        if missing:
            raise StateError(
                f"This is not the state of a tracker hub; {', '.join(missing)} are missing. Pass what "
                "TrackerHub.state_dict returned."
            )
        self._steps.load_state_dict(state["steps"])
        self._resumed = {"run_id": state["run_id"], "trackers": dict(state["trackers"])}
        if not self.running:
            return
        self.run_id = state["run_id"] or self.run_id
        for name, session in self._sessions.items():
            self._queue(functools.partial(session.put, Call("load_state_dict", (self._state_for(name),))))
        self._take_over()

    def _state_for(self, name: str) -> dict[str, Any]:
        """Return the stored state of one tracker, with the step at which the run was left."""
        return {**self._resumed["trackers"].get(name, {}), "step": self._steps.last}

    def _take_over(self) -> None:
        """Go on with what a killed process of this run left: send what it had not sent before the stored step."""
        if self._recorder is None or self.run_id is None:
            return
        if not self.settings.keep_spool:
            for entry in self._recorder.take_over(self.run_id, self._steps.last, self.settings.start_seconds):
                self._emit(entry["kind"], {**entry}, entry["only"])
        self._queue(functools.partial(self._mark, {"kind": "resumed", "run_id": self.run_id}))

    def _check_folder(self, wanted: Mapping[str, Wanted]) -> None:
        needing = [name for name, item in wanted.items() if getattr(_like(item), "requires_logging_directory", False)]
        if not needing or self.logging_dir is None:
            return
        folder = Path(self.logging_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Tried, because the mode of a folder does not tell that its mount is read-only.
            probe = folder / f".accel-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"The logging directory {folder} cannot be written, and {', '.join(needing)} write there; the system "
                f"says {error.strerror or error}. Choose another project_dir or logging_dir."
            ) from error

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

        session = TrackerSession(name, kind, make, self._on_outcome)
        self._sessions[name] = session
        handle: GeneralTracker = TrackerHandle(session, self._send, self._deliver)
        self._faces[name] = item if isinstance(item, GeneralTracker) else handle
        session.start()

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        for name, session in self._sessions.items():
            if session.drain(max(0.0, deadline - time.monotonic())):
                session.adopt_context()
            else:
                self._warn(
                    "The tracker %r did not start within %g s; the run continues, and its logged values wait for the "
                    "tracker.",
                    *(name, self.settings.start_seconds),
                )
        if self._recorder is not None:
            self._recorder.drain(max(0.0, deadline - time.monotonic()))

    def _deliver(self, session: TrackerSession) -> None:
        """Wait a moment until a tracker has what was logged before."""
        if self.running and self._distributor is not None and self._distributor.drain(_FLUSH_S):
            session.drain(_FLUSH_S)

    def _send(self, session: TrackerSession, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call made on one tracker's handle."""
        if not self.running or session is not self._sessions.get(session.name):
            logger.warning(
                "%s of the tracker %r came after the end of its run and is not logged.", method, session.name
            )
            return
        args, kwargs = snapshot(args), snapshot(kwargs)
        if method == "log":
            values, step, more = _log_arguments(*args, **kwargs)
            self._log(dict(values), step, {session.name: more}, [session.name])
        else:
            if method in _FILES:
                args, kwargs = self._kept(session, _FILES[method], args, kwargs)
            self._emit("call", {"method": method, "args": args, "kwargs": kwargs}, [session.name])
        self._raise_pending()

    def _kept(
        self, session: TrackerSession, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the file or folder that a call names, so that the run may remove it."""
        if not args and parameter in kwargs:
            args, kwargs = (kwargs[parameter],), {name: kwargs[name] for name in kwargs if name != parameter}
        if self._recorder is None or not args:
            return args, kwargs
        try:
            return (self._recorder.keep_file(os.fspath(args[0]), self.settings.drain_seconds), *args[1:]), kwargs
        except OSError as error:
            self._on_outcome(session, Call("log_artifact"), error)
            return args, kwargs

    def _log(
        self, values: dict[str, Any], step: object, kwargs: dict[str, dict[str, Any]], only: list[str] | None
    ) -> None:
        for given, filled, names in self._steps.place(values, whole_step(step)):
            entry = {
                "step": given,
                "filled": filled,
                "time": time.time(),
                "values": {name: values[name] for name in names},
                "kwargs": kwargs,
            }
            self._emit("log", entry, only)

    def _emit(self, kind: str, content: dict[str, Any], only: list[str] | None) -> None:
        """Queue an entry: a training step wakes one thread, whatever the number of those behind it."""
        self._seq += 1
        entry = {**content, "kind": kind, "seq": self._seq, "only": only}
        sessions = [self._sessions[name] for name in only or self._sessions]
        self._queue(functools.partial(self._distribute, entry, [each for each in sessions if not each.switched_off]))

    def _queue(self, job: Job) -> None:
        assert self._distributor is not None, "a run that is open has its queue"
        if os.getpid() != self._pid:  # a fork has no threads: nobody would take the job
            if not self._warned_of_fork:
                self._warned_of_fork = True
                self._warn(
                    "Values were logged in process %d, a fork of process %d that runs the trackers; they are not "
                    "stored. Log in the process that called init_trackers.",
                    *(os.getpid(), self._pid),
                )
        elif not self._distributor.put(job):
            # A loop that does nothing but log is faster than the thread that hands out: it waits here.
            self._distributor.drain(self.settings.drain_seconds)
            self._distributor.put(job)

    def _distribute(self, entry: dict[str, Any], sessions: list[TrackerSession]) -> None:
        """Hand an entry to the recorder and to its trackers: neither waits for the other."""
        self._mark(entry)
        for session in sessions:
            if not session.put(Call.of(entry, session.name, session.kind.fills_step)) and session.dropped == 1:
                self._warn(
                    "The queue of the tracker %r is full; until it has room, what is logged %s. Find out why the "
                    "tracker is slow, or log less.",
                    *(session.name, f"goes to {self.spool_path} alone" if self.spool_path else "is lost to it"),
                )

    def _mark(self, line: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.write(line)

    def _on_outcome(self, session: TrackerSession, call: Call, error: BaseException | None) -> None:
        """Note what became of a call; runs in the tracker's thread."""
        name, policy = session.name, self.settings.policy
        if error is None:
            if call.seq is not None:
                session.unsent.discard(call.seq)
                self._mark({"kind": "sent", "tracker": name, "seq": [call.seq]})
            elif call.method in ("start", "load_state_dict"):
                self._mark({"kind": "state", "tracker": name, "state": session.state})
            return
        session.failures += 1
        session.error = text = describe_error(error)
        self._mark({"kind": "failed", "tracker": name, "seq": call.seq, "error": text})
        started = session.tracker is not None
        if policy == "off":
            session.switched_off = True
            session.unsent.clear()
        elif policy == "raise" and (started or call.method == "start"):
            raised = TrackerError(
                f"The tracker {name!r} failed in `{call.method}`; it raised {text}. Repair it, or let runs survive it "
                "with TrackerKwargs(policy='warn')."
            )
            raised.__cause__ = error
            self._errors.append(raised)
        elif policy == "warn" and (call.method == "start" or (started and _is_round(session.failures))):
            path = self.spool_path
            logger.warning(
                "The tracker %r failed in `%s` (%s), failure %d; the run continues. What it failed to store is %s.",
                *(name, call.method, text, session.failures),
                f"in {path}: send it later with `accel trackers replay`" if path else "lost: no spool is written",
            )

    def _raise_pending(self) -> None:
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def _warn(self, message: str, *facts: object) -> None:
        if self.settings.policy != "off":
            logger.warning(message, *facts)


def _named(log_with: Iterable[Wanted]) -> dict[str, Wanted]:
    """Return what was asked for by names of its own: the second of a name is `name#2`."""
    named: dict[str, Wanted] = {}
    for item in log_with:
        name = _plain_name(item.name if isinstance(item, GeneralTracker) else item)
        names = (name, *(f"{name}#{number}" for number in range(2, len(named) + 3)))
        named[next(free for free in names if free not in named)] = item
    return named


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


def _is_round(count: int) -> bool:
    """Return whether a count is 1, 10, 100 and so on: when a repeated failure is worth a warning."""
    return str(count).strip("0") == "1"


def _finish_at_exit(reference: weakref.ref[TrackerHub], pid: int) -> None:
    """Finish a run that its script left open; a forked child has none of its threads and leaves it alone."""
    hub = reference()
    if hub is not None and os.getpid() == pid:
        hub.finish()
