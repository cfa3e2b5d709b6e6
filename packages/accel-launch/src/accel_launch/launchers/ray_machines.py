"""A run on Ray: the actors of its machines, what they print, and how they end."""

import ctypes
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_core.errors import LaunchError
from accel_core.host import environ
from accel_core.host.ports import get_free_port
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.outcome import TRY_AGAIN
from accel_launch.supervision.signals import SignalHandlers
from accel_launch.terminal import colors_wanted, flush_output, paint, say

_FREE_S, _START_S, _PATIENCE_S = 60.0, 900.0, 3.0
"""Seconds that machines have to get free, and to start: what Ray installs there takes a while."""

_GRACE_S = 10.0
"""Seconds that the other machines have to end, and to say why, once one has failed."""

_LOST = -1
"""Status of a machine whose actor is gone."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_FAILED = re.compile(r"^(?:\033\[[\d;]*m)?Rank (\d+) failed first: (.*)\.", re.MULTILINE)
"""What the launcher of a machine reports of a rank of its own, perhaps in color."""


class Machine:
    """What the actor of a machine does: it runs the launcher there."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._process: subprocess.Popen[bytes]

    def facts(self, folder: str, script: str) -> tuple[str, str, int, str]:
        """Return name, address and a free port of the machine, and which path of the run it lacks, if any."""
        lacking = next((path for path in (folder, script) if path and not Path(folder, path).exists()), "")
        return socket.gethostname(), import_module("ray.util").get_node_ip_address(), get_free_port(), lacking

    def run(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> Iterator[bytes | int]:
        """Run the launcher, yield the lines that it prints, and then its status."""
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # the launcher's reaper then ends the ranks
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ray blocks and ignores it in actors
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        command = [sys.executable, "-m", "accel_launch", "launch", *words]
        environment = {**variables, **environ.snapshot()}  # paths and devices are those of this machine
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(
            command, cwd=folder or None, env=environment, bufsize=0, preexec_fn=prepare, **pipes
        )
        self._begun.set()
        rest = b""
        with self._process.stdout as pipe:  # type: ignore[union-attr]  # there is one
            while chunk := pipe.read(1 << 16):
                lines, _, rest = (rest + chunk).rpartition(b"\n")
                yield lines
        yield rest
        yield self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the launcher."""
        self._begun.wait()
        self._process.send_signal(number)


class _Attempt:
    """One attempt of a run: a placement group, with an actor on each of its machines."""

    def __init__(self, ray: Any, settings: Settings, bundle: Mapping[str, int]) -> None:
        self._ray, self._settings = ray, settings
        self._bundle, self._machines = bundle, settings.layout.machines
        self._group = ray.util.placement_group([self._bundle] * self._machines, strategy="STRICT_SPREAD")
        self._actors, self._names, self._words = list[Any](), list[str](), list[list[str]]()
        self._streams, self._ends, self._failed = dict[int, Any](), dict[int, int](), list[tuple[str, str]]()

    def close(self) -> None:
        """End the actors, and with them what they started."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def reserve(self) -> None:
        """Wait for the machines, or raise if the cluster lacks them or they do not get free within the limit."""
        if self._group.wait(_PATIENCE_S):
            return
        given = re.search(r"(?:^|,)\s*timeout=(\d+)", str(self._settings["rdzv_conf"]))
        seconds = float(given[1]) if given else _FREE_S
        there = Counter(_listed(node["Resources"]) for node in self._ray.nodes() if node["Alive"])
        has = "; ".join(f"{count} with {listed}" for listed, count in there.items())
        lack = f"it needs {self._machines} machines with {_listed(self._bundle)} each, got {has}"
        say(f"accel launch: waiting for the Ray cluster up to {seconds:.0f} s; {lack}")
        if not self._group.wait(seconds):
            raise LaunchError(
                f"The Ray cluster lacks machines for the run, or they are busy; {lack}. Ask for less"
                f"{' or pass --cpu' * ('GPU' in self._bundle)}; --rdzv-conf timeout=SECONDS waits longer."
            )

    def start(self, words: Sequence[str], *, sent: bool) -> None:
        """Start the launchers, or raise if a machine cannot start its part or lacks the script."""
        settings, ray = self._settings, self._ray
        place = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        each = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0), "max_concurrency": 2}
        for machine in range(self._machines):
            options = {**each, "scheduling_strategy": place(self._group, placement_group_bundle_index=machine)}
            self._actors.append(ray.remote(Machine).options(**options).remote())
        folder = "" if sent else os.getcwd()
        script = "" if settings["module"] or settings["no_python"] else str(settings.script)
        try:
            facts = ray.get([actor.facts.remote(folder, script) for actor in self._actors], timeout=_START_S)
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"A machine of the Ray cluster cannot start its part; Ray gives: {_last_line(error)}. Check that "
                "accel-launch is installed there, and --ray."
            ) from None
        for machine, (host, address, _, lacking) in enumerate(facts):
            self._names.append(f"machine {machine} ({host}, {address})")
            if lacking:
                raise LaunchError(
                    f"A machine of the Ray cluster lacks a path of the run; {self._names[machine]} has no {lacking!r}. "
                    "Put it on a disk that all machines see, or send the folder with --ray working_dir=."
                )
        port = settings["main_process_port"] or facts[0][2]
        meeting = [f"--main-process-ip={facts[0][1]}", f"--main-process-port={port}"] * (self._machines > 1)
        meeting.append(f"--rdzv-id={ray.get_runtime_context().get_job_id()}")
        for machine, actor in enumerate(self._actors):
            self._words.append([f"--machine-rank={machine}", *meeting, *words])
            # A number of machines from a scheduler: engines do not start other machines themselves.
            variables = {**settings.inherited, "PET_NNODES": str(self._machines)}
            self._streams[machine] = actor.run.remote(self._words[machine], folder, variables)

    def follow(self, signals: SignalHandlers, sent: list[int]) -> tuple[int, str]:
        """Show what the machines print, pass signals on, and return the status of the run and what it comes from."""
        deadline = float("inf")
        while self._streams and time.monotonic() < deadline:
            while sent:
                number = sent.pop(0)
                for machine in self._streams:
                    self._actors[machine].send.remote(number)
            ready, _ = self._ray.wait(list(self._streams.values()), timeout=0.2)
            for machine in [machine for machine, stream in self._streams.items() if stream in ready]:
                self._take(machine)
            if signals.first is None and any(self._ends.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        status = next(filter(None, self._ends.values()), 0)
        return abs(status), self._cause()

    def _take(self, machine: int) -> None:
        try:
            item = self._ray.get(next(self._streams[machine]))
        except (StopIteration, self._ray.exceptions.RayError):
            item = _LOST
        if isinstance(item, int):
            self._ends[machine] = item
            del self._streams[machine]
        elif item:
            self._show(machine, item.decode(errors="replace"))

    def _show(self, machine: int, lines: str) -> None:
        """Print lines with the rank that printed them, or the machine whose launcher did."""
        each, mark = self._settings.layout.per_machine, rf"\[{re.escape(self._settings['role'])}(\d+)\]: "
        there = shlex.join(["accel", "launch", *self._words[machine]])  # nobody typed this
        for rank, how in _FAILED.findall(lines):
            self._failed.append((how, f"rank {rank} on {self._names[int(rank) // each]}"))
        for line in lines.split("\n"):
            found = re.match(mark, line)
            label = f"[rank{machine * each + int(found[1])}]: " if found else f"[{self._names[machine]}]: "
            text = line[found.end() if found else 0 :].replace(there, shlex.join(["accel", *sys.argv[1:]]))
            print(label * bool(found or (line and self._machines > 1)) + text)
        flush_output()

    def _cause(self) -> str:
        """Return which rank of which machine failed first, or which machine is lost."""
        if self._failed:  # where launchers blame different ranks, one that was killed made the others raise
            how, name = min(self._failed, key=lambda pair: pair[0].startswith("exit"))
            return f"{name} failed first: {how}"
        lost = [machine for machine, status in self._ends.items() if status == _LOST]
        if lost or self._streams:
            return f"{' and '.join(self._names[machine] for machine in lost or self._streams)} does not answer"
        machine, status = next(((machine, status) for machine, status in self._ends.items() if status), (0, 0))
        return f"{self._names[machine]} ended with exit status {status}"


def run_on_ray(settings: Settings, words: Sequence[str], bundle: Mapping[str, int], env: Mapping[str, str]) -> int:
    """Run the launcher of each machine in an actor there, again after a failure if that was asked for.

    Raises:
        LaunchError: The cluster cannot be reached, or lacks machines, or one of them cannot start its part.
    """
    ray, most, sent = _connected(settings, env), int(settings["max_restarts"]), list[int]()
    signals = SignalHandlers(sent.append, lambda: sent.append(signal.SIGKILL), sent.append)
    status, cause = 0, ""
    try:
        for restart in range(most + 1):
            if restart:
                say(f"accel launch: {cause}; all machines start again (restart {restart} of {most})")
            attempt = _Attempt(ray, settings, bundle)
            try:
                attempt.reserve()
                attempt.start(words, sent="working_dir" in env)
                signals.install()  # before, Ctrl-C is an error that ends the attempt
                status, cause = attempt.follow(signals, sent)
            finally:
                signals.restore()
                attempt.close()
            if status == 0 or signals.first is not None:
                break
    finally:
        ray.shutdown()  # Ray may report the loss of a machine as well
    if status not in (0, TRY_AGAIN) and signals.first is None and not settings["quiet"]:
        say(f"{paint('accel launch:', 'error', colors_wanted(sys.stderr))} {cause}")
    return status


def _connected(settings: Settings, runtime_env: Mapping[str, str]) -> Any:
    """Return ray, connected to the cluster; for a run on one machine without a cluster Ray is started here."""
    ray, address = import_module("ray"), str(settings["address"])
    import_module("ray.util.placement_group")
    options = {"runtime_env": dict(runtime_env), "log_to_driver": False, "logging_level": logging.ERROR}
    host, colon, port = address.rpartition(":")
    try:
        if colon:  # Ray itself would try for two minutes, or print a traceback where there is no host
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        try:
            ray.init(address, **options)
        except ConnectionError:
            if address != "auto" or settings.layout.machines > 1:
                raise
            say("accel launch: there is no Ray cluster; Ray starts on this machine, and ends with the run")
            ray.init("local", include_dashboard=False, **options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise LaunchError(
            f"The Ray cluster cannot be reached, or refuses the run; {address!r} gives: {_last_line(error)}. Start the "
            "command on a machine of the cluster, where `ray start` ran; check --address and --ray."
        ) from None
    return ray


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _last_line(error: BaseException) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)
