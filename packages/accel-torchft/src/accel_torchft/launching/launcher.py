"""Starts the replicas of a run, each by a launcher of its own, and starts those again that die."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_core.options.engines import engines
from accel_launch.launchers.launcher import Launcher, flags_of
from accel_launch.settings.child import switched
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.outcome import TRY_AGAIN, shell_status
from accel_launch.supervision.supervisor import Supervisor
from accel_launch.terminal import say

__all__ = ["ReplicaLauncher"]

_LOOK_S, _AGAIN_S = 0.05, 1.0
_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_IN_VAIN = 3
"""How many lives in a row a replica may have without a step before it stays away."""


class ReplicaLauncher(Launcher):
    """Several replicas on this machine."""

    name = "replicas"

    def claims(self, settings: Settings) -> bool:
        """Take every run with replicas."""
        return "replicas" in settings and bool(settings["replicas"])  # another package may hide the row

    def command(self, settings: Settings) -> list[str]:
        """Return the command line of one replica.

        Raises:
            ConfigurationError: Settings that contradict each other, or that replicas cannot have.
        """
        _check(settings)
        words = [sys.executable, "-m", "accel_launch", "launch"]
        words += flags_of(settings, ("replicas", "min_replicas", "main_process_port", "log_dir", "watchdog"))
        return [*words, str(settings.script), *settings.arguments]

    def environ(self, settings: Settings) -> Mapping[str, str]:
        """Return what tells a process that it belongs to a replica."""
        return {
            "ACCELERATE_RUNTIME": "replicas",
            "ACCEL_REPLICA_COUNT": str(settings["replicas"]),
            "ACCEL_REPLICA_MIN": str(settings["min_replicas"]),
            "ACCEL_REPLICA_HOST": "127.0.0.1",
        }

    def run(self, settings: Settings) -> int:
        """Start the run, wait for it, and show the lives of its replicas."""
        command = self.command(settings)
        folder = Path(tempfile.mkdtemp(prefix="accel-replicas-"))
        try:
            with Supervisor(settings, command, hold=False) as supervisor:
                lives = _Lives(settings, command, {**settings.inherited, **self.environ(settings)}, supervisor, folder)
                lives.watch()
            if not settings["quiet"]:
                say(lives.report())
            return lives.status()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check(settings: Settings) -> None:
    replicas, fewest = int(settings["replicas"]), int(settings["min_replicas"])
    engines()["replicas"].require()
    if replicas < 2 or fewest > replicas:
        raise ConfigurationError(
            f"A run with replicas has 2 or more of them, and needs no more than it has; got replicas={replicas} and "
            f"min_replicas={fewest}. Change --replicas or --min-replicas."
        )
    others = [
        key for key in ("launcher", "tpu", "mpirun_hostfile", "max_restarts", "log_dir", "watchdog") if settings[key]
    ]
    others += [engine.switch for engine in switched(settings) if engine.name != "fsdp"]
    if settings.layout.machines > 1:
        others.append("num_machines")
    if others:
        raise ConfigurationError(
            f"Replicas are started on one machine, with engines of torch; got --replicas={replicas} and "
            f"{', '.join(f'{key} from {settings.source(key)}' for key in others)}. Leave one out."
        )


class _Lives:
    """The replicas of a run, from the first start to the last end."""

    def __init__(
        self, settings: Settings, command: list[str], environment: dict[str, str], supervisor: Supervisor, folder: Path
    ) -> None:
        self._count, self._fewest = int(settings["replicas"]), int(settings["min_replicas"])
        self._command, self._supervisor, self._folder = command, supervisor, folder
        self._port = _free_port()
        self._environment = {
            **{name: value for name, value in environment.items() if name != "ACCEL_REPLICAS"},  # said to this launcher
            "ACCEL_REPLICA_FOLDER": str(folder),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            **({} if settings["debug"] else {"RUST_LOG": "error"}),
        }
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = [0] * self._count
        self._vain = [0] * self._count
        self._next: dict[int, float] = dict.fromkeys(range(self._count), 0.0)
        self._statuses: dict[int, int] = {}
        self._late: dict[int, float] = {}
        self._debug = bool(settings["debug"])
        self._began = time.time()
        self._events: list[tuple[float, str]] = []

    def watch(self) -> None:
        """Start replicas, and start them again, until the run is over."""
        self._supervisor.signals.install()
        try:
            while self._running or self._next:
                self._keep_lighthouse()
                for number in [each for each, when in self._next.items() if when <= time.monotonic()]:
                    del self._next[number]
                    self._start(number)
                for number, process in list(self._running.items()):
                    status = process.poll()
                    if status is not None:
                        del self._running[number]
                        self._ended(number, status)
                    elif 0 in self._statuses.values() and not self._made_steps(number):
                        self._send_home(number, process)
                time.sleep(_LOOK_S)
        finally:
            if self._lighthouse is not None:
                self._lighthouse.terminate()
                self._lighthouse.wait()
            self._read_events()

    def _made_steps(self, number: int) -> bool:
        return (self._folder / f"made-{number}-{self._lives[number]}").exists()

    def _send_home(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """End a replica that came when the run was over: nobody is left to heal it."""
        if time.monotonic() > self._late.get(number, 0.0):
            self._late[number] = time.monotonic() + _AGAIN_S
            process.terminate()  # a second time ends what took no notice of the first

    def _keep_lighthouse(self) -> None:
        if self._lighthouse is None or self._lighthouse.poll() is not None:
            if self._lighthouse is not None:
                self._note("the lighthouse ended, and starts again")
            words = [sys.executable, "-m", "accel_torchft.launching.lighthouse", str(self._port), str(self._fewest)]
            variables = {**self._environment, **self._supervisor.variables(0)}
            quiet = None if self._debug else subprocess.DEVNULL
            self._lighthouse = subprocess.Popen(
                words, env=variables, stdout=quiet, stderr=quiet, start_new_session=True
            )

    def _start(self, number: int) -> None:
        self._supervisor.follow(number, number)
        variables = {"ACCEL_REPLICA": str(number), "ACCEL_REPLICA_LIFE": str(self._lives[number])}
        process = subprocess.Popen(
            self._command,
            env={**self._environment, **self._supervisor.variables(number), **variables},
            start_new_session=True,
        )
        self._running[number] = process
        self._supervisor.started(number, process.pid)
        self._supervisor.signals.repeat()

    def _ended(self, number: int, status: int) -> None:
        self._statuses[number] = status
        made = self._made_steps(number)
        if status == 0:
            (self._folder / "finished").touch()
            self._next.clear()  # who is behind has nobody left to heal it, and the run is over
            return
        if number in self._late:
            self._note(f"replica {number} came when the run was over")
            return
        shown = shell_status(status)
        how = f"killed by {signal.Signals(shown - 128).name}" if shown > 128 else f"exit code {shown}"
        if not any(map(self._made_steps, self._running)):
            (self._folder / "epochs").unlink(missing_ok=True)  # no state is left: all begin anew
        self._vain[number] = 0 if made else self._vain[number] + 1
        self._lives[number] += 1
        over = 0 in self._statuses.values() or self._supervisor.signals.first is not None
        stays = over or self._vain[number] >= _IN_VAIN or (self._folder / f"stays-away-{number}").exists()
        wait = _BACKOFF_S[min(self._vain[number], len(_BACKOFF_S) - 1)]
        if not stays:
            self._next[number] = time.monotonic() + wait
        then = "stays away" if stays else f"starts again {f'in {wait:g} s' if wait else 'at once'}"
        self._note(f"replica {number} ended: {how}; it {then}. {self._there()}")

    def _there(self) -> str:
        there = sorted(self._running)
        missing = self._fewest - len(there)
        return f"{len(there)} of {self._count} run" + (f", {missing} fewer than a step needs" if missing > 0 else "")

    def _note(self, text: str) -> None:
        self._events.append((time.time(), text))
        say(f"accel launch: {text}")

    def _read_events(self) -> None:
        with suppress(OSError):
            lines = (self._folder / "events").read_text().splitlines()
            before: list[int] = []
            for event in map(json.loads, lines):
                living = event["living"]
                gone, came = sorted({*before} - {*living}), sorted({*living} - {*before})
                parts = [
                    f"{word} {', '.join(map(str, each))}" for word, each in (("without", gone), ("with", came)) if each
                ]
                if before and parts:
                    held = f"{event['waited']:.1f} s after the one before"
                    self._events.append((event["when"], f"step {event['step']} was made {' and '.join(parts)}, {held}"))
                before = living

    def report(self) -> str:
        """Return who left when, why, and how long the others waited."""
        lines = [f"{when - self._began:8.1f} s  {text}" for when, text in sorted(self._events)]
        ended = [number for number, status in self._statuses.items() if status == 0]
        head = f"accel launch: {len(ended)} of {self._count} replicas came to the end of the script"
        return "\n".join([head, *lines])

    def status(self) -> int:
        """Return the exit status of the run: 0 where a replica came to its end."""
        statuses = self._statuses.values()
        if 0 in statuses:
            return 0
        if TRY_AGAIN in statuses:
            return TRY_AGAIN
        sent = self._supervisor.signals.first
        return shell_status(-sent) if sent is not None else shell_status(next(iter(statuses), 1))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
