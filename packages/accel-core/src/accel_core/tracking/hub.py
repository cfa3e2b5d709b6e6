"""All trackers of a run behind one object: queue, spool, policy, steps."""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, StateError, TrackerError
from accel_core.options.enums import LoggerType
from accel_core.tracking.codec import encode
from accel_core.tracking.delivery import Call, Delivery
from accel_core.tracking.discovery import LOGGER_TYPE_TO_CLASS, Wanted, filter_trackers
from accel_core.tracking.entries import call_of, log_arguments, whole_step
from accel_core.tracking.handle import TrackerHandle
from accel_core.tracking.null import NOTHING, null_tracker
from accel_core.tracking.recorder import Recorder
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.snapshot import keep_file, snapshot
from accel_core.tracking.spool import FORMAT_VERSION, SUFFIX, SpoolWriter
from accel_core.tracking.steps import StepCounter
from accel_core.tracking.tracker import GeneralTracker

__all__ = ["TrackerHub"]

logger = logging.getLogger(__name__)

_MOMENT = 1.0
_FILES = frozenset({"log_artifact", "log_artifacts"})


class TrackerHub:
    """The trackers of one run.

    Logging calls return at once: a value is copied, written to the spool and given to each tracker in that tracker's
    own thread. What a tracker fails to take stays in the spool, and `policy` says what else happens.

    Args:
        log_with: What to log with: see `filter_trackers`.
        logging_dir: Folder for trackers that write to one, and for the spool.
        is_main: Whether this rank tracks; the others hold trackers that do nothing.
        policy: Overrides the policy of `settings`: `raise`, `warn` or `off`.
        settings: How failing and slow trackers are treated.

    Attributes:
        trackers: After `init`, one handle for each tracker; on other ranks null trackers.
        log_with: What was asked for, checked.
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
        policy: str | None = None,
        settings: TrackerKwargs | None = None,
    ) -> None:
        self.settings = settings if settings is not None else TrackerKwargs()
        if policy is not None:
            self.settings = TrackerKwargs(**{**vars(self.settings), "policy": policy})
        self.log_with = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.is_main = is_main
        self.trackers: list[GeneralTracker] = []
        self.run_id: str | None = None
        self._project = ""
        self._steps = StepCounter()
        self._resumed: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._recorder: Recorder | None = None
        self._spool: SpoolWriter | None = None
        self._seq = 0
        self._owed: dict[str, set[int]] = {}
        self._failures: dict[str, int] = {}
        self._errors: list[TrackerError] = []
        self._off: set[str] = set()

    @property
    def running(self) -> bool:
        """Whether a run is open on this rank."""
        return self._recorder is not None

    @property
    def spool_path(self) -> Path | None:
        """The spool file of the run; `None` before `init`, on other ranks, and where it cannot be written."""
        return self._spool.path if self._spool is not None else None

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker and store the configuration in it.

        A run that is open is finished first.

        Args:
            project_name: Name of the run or project; each tracker's first argument.
            config: Configuration of the run: any nesting of anything.
            init_kwargs: By tracker name, keyword arguments of its constructor.

        Raises:
            ConfigurationError: The logging directory cannot be written.
            TrackerError: With the policy `raise`, a tracker did not start.
        """
        self.finish()
        wanted = [(self._name_of(item), item) for item in self.log_with]
        if not self.is_main:
            self.trackers = [null_tracker(self._class_of(item)) for _, item in wanted]
            return
        self.trackers = []
        if not wanted:
            return
        self._check_folder()
        self.run_id = self._resumed.get("run_id") or uuid.uuid4().hex[:12]
        self._project = str(project_name)
        self._open_spool([name for name, _ in wanted])
        for name, item in wanted:
            self._add(name, item, dict((init_kwargs or {}).get(name, {})))
        self._wait_for_start()
        atexit.register(_finish_at_exit, weakref.ref(self), os.getpid())
        if config is not None:
            self._emit("config", {"values": snapshot(dict(config))}, None)
        self._raise_pending()

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker; returns at once.

        Args:
            values: Numbers, texts, tensors of one element, or mappings of numbers, by name.
            step: Number of the step. Without one, trackers that cannot count get the run's next.
            log_kwargs: By tracker name, keyword arguments of its `log`.

        Raises:
            ConfigurationError: The values are not a mapping.
            TrackerError: With the policy `raise`, a tracker failed in an earlier call.
        """
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"Logged values are a mapping from names to values; got {type(values).__name__}. "
                'Write for example accelerator.log({"loss": loss}, step=step).'
            )
        if self._recorder is not None:
            kwargs = {name: dict(given) for name, given in (log_kwargs or {}).items()}
            self._log(snapshot(dict(values)), step, kwargs, None)
            self._raise_pending()

    def get(self, name: str | LoggerType, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        Args:
            name: The tracker's name.
            unwrap: Return the library's own run object instead.

        Returns:
            The tracker; on other ranks one that does nothing, or `NOTHING`.

        Raises:
            ConfigurationError: No such tracker runs here.
        """
        wanted = str(name.value) if isinstance(name, LoggerType) else name
        for tracker in self.trackers:
            if tracker.name == wanted:
                return tracker.tracker if unwrap else tracker
        if not self.is_main:
            return NOTHING if unwrap else null_tracker(LOGGER_TYPE_TO_CLASS.get(wanted, GeneralTracker))
        running = [tracker.name for tracker in self.trackers]
        raise ConfigurationError(
            f"No tracker {wanted!r} is running; running are {running or 'none'}. Name it in log_with and call "
            "init_trackers before get_tracker."
        )

    def finish(self) -> None:
        """Finish every tracker, waiting for the slow ones no longer than `drain_seconds`; a second call does nothing.

        Raises:
            TrackerError: With the policy `raise`, a tracker failed.
        """
        recorder = self._recorder
        if recorder is None:
            return
        deadline = time.monotonic() + self.settings.drain_seconds
        recorder.drain(self.settings.drain_seconds)
        for delivery in self._deliveries.values():
            delivery.finish()
        for name, delivery in self._deliveries.items():
            done = delivery.close(max(0.0, deadline - time.monotonic()))
            if done and delivery.tracker is not None and delivery.tracker.starts_on_caller:
                delivery.call(Call("release"))
            if not done and self.settings.policy != "off":
                logger.warning(
                    "The tracker %r did not take everything within %g s; %d entries are not sent.",
                    name,
                    self.settings.drain_seconds,
                    len(self._owed[name]),
                )
        self._recorder = None
        recorder.mark({"kind": "end", "time": time.time()})
        recorder.close()
        self._close_spool()
        self._states = self.tracker_states
        self._deliveries = {}
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
        states = {name: delivery.state for name, delivery in self._deliveries.items()}
        return {**self._resumed.get("trackers", {}), **self._states, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that a checkpoint stored: its id, its steps, its runs in the trackers' libraries.

        Works before `init` and after it; after it, the trackers change over to the stored runs in their threads.

        Raises:
            StateError: The state is not one of `state_dict`.
        """
        missing = sorted({"run_id", "steps", "trackers"} - set(state))
        if missing:
            raise StateError(
                f"This is not the state of a tracker hub; {', '.join(missing)} are missing. Pass what "
                "TrackerHub.state_dict returned."
            )
        self._steps.load_state_dict(state["steps"])
        self._resumed = {"run_id": state["run_id"], "trackers": dict(state["trackers"])}
        if self._recorder is None:
            return
        self.run_id = state["run_id"] or self.run_id
        self._recorder.mark({"kind": "resumed", "run_id": self.run_id})
        for name, delivery in self._deliveries.items():
            delivery.put(Call("load_state_dict", (self._state_for(name),)))

    def _state_for(self, name: str) -> dict[str, Any]:
        """Return the stored state of one tracker, with the step at which the run was left."""
        return {**self._resumed["trackers"].get(name, {}), "step": self._steps.last}

    def _name_of(self, item: Any) -> str:
        if isinstance(item, GeneralTracker):
            name = str(item.name)
            same = [known for known in self.log_with if getattr(known, "name", None) == name]
            number = next(index for index, known in enumerate(same) if known is item)
            return name if number == 0 else f"{name}#{number + 1}"
        return str(item.value) if isinstance(item, LoggerType) else str(item)

    def _class_of(self, item: Any) -> type[GeneralTracker] | GeneralTracker:
        return item if isinstance(item, GeneralTracker) else LOGGER_TYPE_TO_CLASS[self._name_of(item)]

    def _check_folder(self) -> None:
        needing = [
            self._name_of(item)
            for item in self.log_with
            if getattr(self._class_of(item), "requires_logging_directory", False)
        ]
        if not needing or self.logging_dir is None:
            return
        folder = Path(self.logging_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".accel-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"The logging directory {folder} cannot be written, and {', '.join(needing)} write there; the system "
                f"says {error.strerror or error}. Choose another project_dir or logging_dir."
            ) from error

    def _open_spool(self, names: list[str]) -> None:
        folder = self.settings.spool_folder(self.logging_dir)
        slug = re.sub(r"[^\w.-]+", "-", self._project).strip("-.") or "run"
        stem = f"{slug[:60]}-{self.run_id}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        head = {
            "kind": "run",
            "version": FORMAT_VERSION,
            "run_id": self.run_id,
            "project": self._project,
            "trackers": names,
            "started": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            path = folder / f"{stem}{SUFFIX}"
            for number in range(2, 1000):
                if not path.exists():
                    break
                path = folder / f"{stem}-{number}{SUFFIX}"
            self._spool = SpoolWriter(path)
            self._spool.write(head)
        except OSError as error:
            self._spool = None
            logger.warning(
                "No spool file can be written in %s (%s); values that a tracker fails to take are lost. Choose a "
                "folder with TrackerKwargs(spool_dir=...).",
                folder,
                error,
            )
        self._recorder = Recorder(self._spool)

    def _add(self, name: str, item: Any, kwargs: dict[str, Any]) -> None:
        state = self._state_for(name) if self._resumed else None
        project, logging_dir = self._project, self.logging_dir
        kind: Any = type(item) if isinstance(item, GeneralTracker) else LOGGER_TYPE_TO_CLASS[name]

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

        delivery = Delivery(name, make, self._settled, fills_step=kind.fills_step)
        self._deliveries[name] = delivery
        self._owed[name] = set()
        self._failures[name] = 0
        self.trackers.append(TrackerHandle(delivery, kind, self._send, self._settle))
        delivery.start(on_caller=kind.starts_on_caller)

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        for name, delivery in self._deliveries.items():
            if delivery.drain(max(0.0, deadline - time.monotonic())):
                delivery.adopt_context()
            elif self.settings.policy != "off":
                logger.warning(
                    "The tracker %r did not start within %g s; the run goes on, and what it logs waits in the spool.",
                    name,
                    self.settings.start_seconds,
                )

    def _settle(self, delivery: Delivery) -> None:
        """Wait a moment until a tracker has what was logged before."""
        if self._recorder is not None and self._recorder.drain(_MOMENT):
            delivery.drain(_MOMENT)

    def _send(self, tracker: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call made on one tracker's handle."""
        if self._recorder is None:
            logger.warning("%s of the tracker %r came after the end of its run and is not logged.", method, tracker)
            return
        args, kwargs = snapshot(args), snapshot(kwargs)
        if method == "log":
            values, step, more = log_arguments(*args, **kwargs)
            self._log(dict(values), step, {tracker: more}, [tracker])
        else:
            if method in _FILES and args:
                args = self._kept(tracker, args)
            self._emit("call", {"method": method, "args": args, "kwargs": kwargs}, [tracker])
        self._raise_pending()

    def _kept(self, tracker: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy the file or folder that a call names, so that the run may remove it."""
        if self._spool is None:
            return args
        try:
            return (keep_file(os.fspath(args[0]), self._spool.files), *args[1:])
        except OSError as error:
            self._settled(tracker, Call("log_artifact"), error)
            return args

    def _log(
        self, values: dict[str, Any], step: Any, kwargs: dict[str, dict[str, Any]], only: list[str] | None
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
        recorder = self._recorder
        assert recorder is not None, "a run is open"
        self._seq += 1
        entry = {"kind": kind, "seq": self._seq, "only": only, **content}
        targets = [self._deliveries[name] for name in (only or self._deliveries) if name not in self._off]
        for delivery in targets:
            self._owed[delivery.name].add(entry["seq"])

        def deliver() -> None:
            for delivery in targets:
                delivery.put(call_of(entry, delivery.name, delivery.fills_step))

        recorder.put(entry, deliver)

    def _settled(self, name: str, call: Call, error: Exception | None) -> None:
        """Note what became of a call; runs in the tracker's thread."""
        recorder = self._recorder
        if error is None:
            if call.seq is not None:
                self._owed[name].discard(call.seq)
                if recorder is not None:
                    recorder.mark({"kind": "sent", "tracker": name, "seq": [call.seq]})
            elif recorder is not None and call.method in ("start", "load_state_dict"):
                state = self._deliveries[name].state
                recorder.mark({"kind": "state", "tracker": name, "state": encode(state)})
            return
        policy = self.settings.policy
        self._failures[name] += 1
        text = f"{type(error).__name__}: {error}"
        if recorder is not None:
            recorder.mark({"kind": "failed", "tracker": name, "seq": call.seq, "error": text})
        if policy == "off":
            self._off.add(name)
            self._owed[name].clear()
            return
        delivery = self._deliveries.get(name)
        started = delivery is not None and delivery.tracker is not None
        if policy == "raise" and (started or call.method == "start"):
            raised = TrackerError(
                f"The tracker {name!r} failed in `{call.method}`; it raised {text}. Repair it, or let runs survive it "
                "with TrackerKwargs(policy='warn')."
            )
            raised.__cause__ = error
            self._errors.append(raised)
        elif policy == "warn" and (call.method == "start" or (started and _is_round(self._failures[name]))):
            logger.warning(
                "The tracker %r failed in `%s` (%s), failure %d; the run goes on. What it did not take is in %s: send "
                "it later with `accel trackers replay`.",
                name,
                call.method,
                text,
                self._failures[name],
                self.spool_path or "no spool",
            )

    def _raise_pending(self) -> None:
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def _close_spool(self) -> None:
        spool, self._spool = self._spool, None
        if spool is None:
            return
        owed = {name: len(numbers) for name, numbers in self._owed.items() if numbers}
        spool.close(keep=self.settings.keep_spool or bool(owed))
        if owed and self.settings.policy != "off":
            logger.warning(
                "Entries that trackers did not take (%s) are in %s. Send them with `accel trackers replay %s`.",
                ", ".join(f"{name}: {count}" for name, count in owed.items()),
                spool.path,
                spool.path,
            )


def _is_round(count: int) -> bool:
    """Tell whether a count is 1, 10, 100 and so on: how often a repeated failure is told."""
    return str(count).strip("0") == "1"


def _finish_at_exit(reference: weakref.ref[TrackerHub], pid: int) -> None:
    """Finish a run that its script left open; a forked child has none of its threads and leaves it alone."""
    hub = reference()
    if hub is not None and os.getpid() == pid:
        hub.finish()
