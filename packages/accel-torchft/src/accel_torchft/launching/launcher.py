"""Starts this machine's replicas of a run, each by a launcher of its own, and starts those again that die."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from accel_core.errors import ConfigurationError, LaunchError
from accel_core.host.ports import get_free_port
from accel_core.options.engines import engines
from accel_launch.imports import load
from accel_launch.launchers.launcher import Launcher, flags_of
from accel_launch.launchers.preflight import check_agreement, facts_of_machine, own_address
from accel_launch.settings.child import switched
from accel_launch.settings.devices import visible_gpus, visible_variable
from accel_launch.settings.layout import counted
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.outcome import TRY_AGAIN, shell_status
from accel_launch.supervision.supervisor import Supervisor
from accel_launch.terminal import say

if TYPE_CHECKING:
    from accel_torchft.notes import Notes

_OF_RUN = {
    "replicas", "min_replicas", "log_dir", "watchdog", "num_machines", "nnodes", "machine_rank", "main_process_ip",
    "main_process_port", "rdzv_backend", "rdzv_conf", "gpu_ids",
}  # fmt: skip
"""Settings that a replica does not get from the run."""

_OF_REPLICA = ("--nnodes=1", "--machine-rank=0", "--main-process-port=0")
"""What it gets instead: a file or a scheduler may say otherwise, of the run."""

_LOOK_S, _HEAR_S, _AGAIN_S = 0.05, 0.5, 1.0
_SILENT_S, _GONE_S = 10.0, 60.0
"""How long another machine is silent before its replicas are taken for dead, and machine 0 before the run is over."""

_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_IN_VAIN = 3
"""How many lives in a row a replica may have without a step before it stays away."""


class ReplicaLauncher(Launcher):
    """Several replicas, on this machine and on others."""

    name = "replicas"

    def claims(self, settings: Settings) -> bool:
        """Take every run with replicas; one that is submitted to SLURM is taken on each machine of the job."""
        asked = "replicas" in settings and bool(settings["replicas"])  # another package may hide the row
        return asked and settings["launcher"] != "slurm"

    def command(self, settings: Settings) -> list[str]:
        """Return the command line of one replica.

        Raises:
            ConfigurationError: Settings that contradict each other, or that replicas cannot have.
        """
        _check(settings)
        words = [sys.executable, "-m", "accel_launch", "launch", *flags_of(settings, _OF_RUN), *_OF_REPLICA]
        return [*words, str(settings.script), *settings.arguments]

    def environ(self, settings: Settings) -> Mapping[str, str]:
        """Return what tells a process that it belongs to a replica."""
        return {
            "ACCELERATE_RUNTIME": "replicas",
            "ACCEL_REPLICA_COUNT": str(settings["replicas"]),
            "ACCEL_REPLICA_MIN": str(settings["min_replicas"]),
        }

    def run(self, settings: Settings) -> int:
        """Start this machine's replicas, wait for the run, and on machine 0 show the lives of all replicas."""
        command = self.command(settings)
        with Supervisor(settings, command, hold=False) as supervisor:
            lives = _Lives(settings, command, {**settings.inherited, **self.environ(settings)}, supervisor)
            lives.watch()
            if settings.layout.machine_rank == 0 and not settings["quiet"]:
                say(lives.report())
            return lives.status


def _check(settings: Settings) -> None:
    replicas, fewest, layout = int(settings["replicas"]), int(settings["min_replicas"]), settings.layout
    engines()["replicas"].require()
    if replicas < max(2, layout.machines) or fewest > replicas:
        raise ConfigurationError(
            "A run with replicas has 2 or more of them, at least one on each machine, and needs no more than it has; "
            f"got replicas={replicas} and min_replicas={fewest} on {counted(layout.machines, 'machine')}. Change "
            "--replicas or --min-replicas."
        )
    others = [
        key for key in ("launcher", "tpu", "mpirun_hostfile", "max_restarts", "log_dir", "watchdog") if settings[key]
    ]
    others += [engine.switch for engine in switched(settings) if engine.name != "fsdp"]
    others += ["nnodes"] * (layout.fewest_machines < layout.machines)
    others += ["rdzv_backend"] * (settings["rdzv_backend"] != "static")
    if others:
        raise ConfigurationError(
            f"Replicas are started on a fixed number of machines, with engines of torch; got --replicas={replicas} and "
            f"{', '.join(f'{key} from {settings.source(key)}' for key in others)}. Leave one out."
        )


def gpus_of(settings: Settings, replicas: range) -> dict[int, dict[str, str]]:
    """Return, for each replica of this machine, the variable that gives it GPUs of its own; none where there are none.

    Raises:
        ConfigurationError: There are fewer than they have processes.
    """
    each, named = settings.layout.processes, settings["gpu_ids"]
    variable = visible_variable(None) if named in (None, "all") else "ACCEL_GPU_IDS"
    ids = [] if settings["cpu"] else visible_gpus(settings.inherited, named)
    if not ids:
        return {number: {} for number in replicas}
    if len(ids) < each * len(replicas):
        raise ConfigurationError(
            f"Each process of each replica has a GPU; got {each} in each of {len(replicas)} replicas of this machine, "
            f"and {counted(len(ids), 'GPU')}. Lower --num-processes or --replicas, or pass --cpu."
        )
    places = {number: (number - replicas.start) * each for number in replicas}
    return {number: {variable: ",".join(ids[at : at + each])} for number, at in places.items()}


def _meet(settings: Settings) -> tuple[object, str, list[str], str]:
    """Meet the other machines; return what is kept for the store, its place, all machines, and the lighthouse's place.

    Raises:
        LaunchError: A machine does not come, or differs from machine 0.
    """
    layout, machine = settings.layout, settings.layout.machine_rank
    if layout.machines == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, f"127.0.0.1:{listener.getsockname()[1]}", ["127.0.0.1"], f"127.0.0.1:{get_free_port()}"
    rendezvous = load("accel_launch.launchers.elastic").rendezvous_of(settings, layout)
    store = rendezvous.next_rendezvous().store
    facts = facts_of_machine(settings.script, layout.processes)
    facts |= {key: settings[key] for key in ("replicas", "min_replicas")}
    check_agreement(store, machine, layout.machines, facts, elastic=False)
    # Its name stands for loopback on many a machine 0: it takes the address from which it reaches the next one.
    host, port = str(settings["main_process_ip"]), int(settings["main_process_port"])
    own = own_address(host, port) if machine else own_address(store.get("accel/host/1").decode(), 1)
    store.set(f"accel/host/{machine}", str(own))
    hosts = [store.get(f"accel/host/{each}").decode() for each in range(layout.machines)]
    if machine == 0:
        store.set("accel/lighthouse", f"{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{get_free_port()}")
    return rendezvous, f"{host}:{port}", hosts, store.get("accel/lighthouse").decode()


class _Lives:
    """The replicas of this machine, from the first start to the last end.

    Attributes:
        status: Exit status of the run: 0 where a replica came to its end.
    """

    def __init__(
        self, settings: Settings, command: list[str], environment: dict[str, str], supervisor: Supervisor
    ) -> None:
        self._machine, self._machines = settings.layout.machine_rank, settings.layout.machines
        self._count, self._fewest = int(settings["replicas"]), int(settings["min_replicas"])
        self._command, self._supervisor = command, supervisor
        self._gpus = gpus_of(settings, self._share(self._machine))
        self._serves, self._place, self._hosts, self._address = _meet(settings)
        own = self._hosts[self._machine]
        direct = [environment.get("no_proxy") or environment.get("NO_PROXY"), *self._hosts]  # states come by HTTP
        self._environment = {
            # Said to this launcher, and of it: a rank would take SLURM's number of it for its own.
            **{name: value for name, value in environment.items() if name not in ("ACCEL_REPLICAS", "SLURM_PROCID")},
            "ACCEL_REPLICA_STORE": self._place,
            "ACCEL_REPLICA_HOSTS": ",".join([own, *(each for each in self._hosts if each != own)]),
            "TORCHFT_LIGHTHOUSE": f"http://{self._address}",
            "no_proxy": ",".join(filter(None, direct)),
            **({} if settings["debug"] else {"RUST_LOG": "error"}),
        }
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = dict.fromkeys(self._share(self._machine), 0)
        self._vain = dict.fromkeys(self._lives, 0)
        self._next = dict.fromkeys(self._lives, 0.0)
        self._seen: dict[int, tuple[list[str], float]] = {}
        self._late: dict[int, tuple[float, str]] = {}
        self._said = {each: ("busy", time.monotonic()) for each in range(self._machines) if each != self._machine}
        self._lost: set[int] = set()
        self._debug, self._is_over, self.status = bool(settings["debug"]), False, 1
        self._began, self._heard, self._beat = time.time(), 0.0, time.monotonic()
        self._failure: BaseException | None = None

    @cached_property
    def _notes(self) -> "Notes":
        module = load("accel_torchft.notes")  # after the first starts: importing torch takes as long as they do
        if self._machines == 1:
            self._serves = module.serve(self._serves)
        notes: Notes = module.Notes(self._place)
        return notes

    def _share(self, machine: int) -> range:
        """Return the replicas of a machine; the first machines have one more if the number is not divisible."""
        each, more = divmod(self._count, self._machines)
        first = machine * each + min(machine, more)
        return range(first, first + each + (machine < more))

    def watch(self) -> None:
        """Start replicas, and start them again, until the run is over.

        Raises:
            LaunchError: Machine 0 is gone.
        """
        self._supervisor.signals.install()
        # Beside the main thread, which handles signals while the store of a machine that is cut off does not answer.
        thread = threading.Thread(target=self._guarded, name="accel-replicas", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_AGAIN_S)
            if self._machine and time.monotonic() > self._beat + _GONE_S:
                raise LaunchError(
                    f"The launcher of machine 0 keeps what replicas tell each other; got no answer for {_GONE_S:.0f} s "
                    f"at {self._place}. See whether that machine can be reached, and start the run again."
                )
        if self._failure is not None:
            raise self._failure

    def _guarded(self) -> None:
        try:
            self._watch()
        except BaseException as failure:  # the main thread raises it
            self._failure = failure
        finally:
            if self._lighthouse is not None:
                self._lighthouse.terminate()
                self._lighthouse.wait()

    def _watch(self) -> None:
        while self._running or self._next or not self._is_done():
            self._beat = time.monotonic()
            if self._machine == 0:
                self._keep_lighthouse()
            for number in [each for each, when in self._next.items() if when <= time.monotonic()]:
                del self._next[number]
                self._start(number)
            self._hear()
            for number, process in list(self._running.items()):
                status = process.poll()
                if status is not None:
                    del self._running[number]
                    self._ended(number, status)
                elif self._is_over:
                    self._hasten(number, process)
            time.sleep(_LOOK_S)
        self._close()

    def _hear(self) -> None:
        """Tell the other machines how this one is, and take notice of what they tell."""
        now, sent = time.monotonic(), self._supervisor.signals.first
        if now < self._heard + _HEAR_S:
            return
        self._heard, self._is_over = now, self._notes.has("finished")
        if self._machines > 1:
            self._notes.write(f"machine-{self._machine}", f"{now} {'busy' if self._running or self._next else 'idle'}")
            if self._machine == 0:
                self._look_for_machines(now)
            elif sent is None and self._notes.has("signal"):
                os.kill(os.getpid(), int(self._notes.read("signal")))
        if sent is not None and self._machine == 0:
            self._notes.write("signal", str(int(sent)))
        if self._is_over or sent is not None:
            self._next.clear()

    def _look_for_machines(self, now: float) -> None:
        for machine, (before, when) in self._said.items():
            said = self._notes.read(f"machine-{machine}", "busy")
            name = f"machine {machine} ({self._hosts[machine]})"
            if said != before:
                self._said[machine] = said, now
                if machine in self._lost:
                    self._lost.remove(machine)
                    self._note(f"{name} answers again")
            elif said != "left" and now > when + _SILENT_S and machine not in self._lost:
                self._lost.add(machine)
                own = ", ".join(map(str, self._share(machine)))
                self._note(f"{name} does not answer; its replicas are taken for dead: {own}")
        self._notes.write("lost", json.dumps([*self._lost]))

    def _is_done(self) -> bool:
        """Return whether nothing is left to wait for: on machine 0 for the others, on those for its result."""
        if self._machine:
            return self._supervisor.signals.first is not None or self._notes.has("result")
        return all(each in self._lost or not said.endswith("busy") for each, (said, _) in self._said.items())

    def _close(self) -> None:
        """Settle the status of the run; machine 0 serves its store until the others know it."""
        if self._machine and self._supervisor.signals.first is None:
            self.status = int(self._notes.read("result"))
        else:
            self.status = self._outcome()
        if self._machine:
            self._notes.write(f"machine-{self._machine}", "left")
            return
        self._notes.write("result", str(self.status))
        while not all(said == "left" or each in self._lost for each, (said, _) in self._said.items()):
            self._hear()
            time.sleep(_LOOK_S)

    def _at(self, number: int) -> list[str]:
        """Return the last life of a replica that made steps, how long a step may take, and the last step."""
        found: list[str] = self._notes.read(f"at-{number}", "- 0 -").split()
        return found

    def _is_state_left(self) -> bool:
        """Return whether a replica lives, on any machine, that has made steps."""
        lost = {number for machine in json.loads(self._notes.read("lost", "[]")) for number in self._share(machine)}
        others = {*range(self._count)} - lost
        return any(self._at(each)[0] == self._notes.read(f"life-{each}", "0") for each in others)

    def _hasten(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """End a replica that came when the run was over, as nobody is left to heal it, and one that hangs in a step."""
        now, at = time.monotonic(), self._at(number)
        before, since = self._seen.get(number, ([], now))
        if at != before:
            self._seen[number] = at, now
        elif number in self._late:
            when, why = self._late[number]
            if now > when:
                self._late[number] = now + _AGAIN_S, why
                process.terminate()  # a second time ends what took no notice of the first
        elif at[0] != str(self._lives[number]):
            self._late[number] = 0.0, f"replica {number} came when the run was over"
        elif at[2] != "-" and now > since + float(at[1]):
            why = f"it made no step for {at[1]} s after others came to the end"
            self._late[number] = 0.0, f"replica {number} hung, and was ended: {why}"

    def _keep_lighthouse(self) -> None:
        if self._lighthouse is None or self._lighthouse.poll() is not None:
            if self._lighthouse is not None:
                self._note("the lighthouse ended, and starts again")
            words = [sys.executable, "-m", "accel_torchft.launching.lighthouse", self._address, str(self._fewest)]
            variables = {**self._environment, **self._supervisor.variables(0)}
            quiet = None if self._debug else subprocess.DEVNULL
            self._lighthouse = subprocess.Popen(
                words, env=variables, stdout=quiet, stderr=quiet, start_new_session=True
            )

    def _start(self, number: int) -> None:
        self._supervisor.follow(number, number)
        own = {"ACCEL_REPLICA": str(number), "ACCEL_REPLICA_LIFE": str(self._lives[number]), **self._gpus[number]}
        process = subprocess.Popen(
            self._command,
            env={**self._environment, **self._supervisor.variables(number), **own},
            start_new_session=True,
        )
        self._running[number] = process
        self._supervisor.started(number, process.pid)
        self._supervisor.signals.repeat()

    def _ended(self, number: int, status: int) -> None:
        self._notes.write(f"status-{number}", str(status))
        if status == 0:
            self._notes.write("finished")
            self._is_over = True
            self._next.clear()  # who is behind has nobody left to heal it
            return
        if number in self._late:
            self._note(self._late[number][1])
            return
        shown = shell_status(status)
        how = f"killed by {signal.Signals(shown - 128).name}" if shown > 128 else f"exit code {shown}"
        made_steps = self._at(number)[0] == str(self._lives[number])
        self._vain[number] = 0 if made_steps else self._vain[number] + 1
        self._lives[number] += 1
        self._notes.write(f"life-{number}", str(self._lives[number]))
        if not self._is_state_left():
            self._notes.write("epochs", "{}")  # all begin anew
        over = self._is_over or self._supervisor.signals.first is not None
        stays = over or self._vain[number] >= _IN_VAIN or self._notes.has(f"stays-away-{number}")
        wait = _BACKOFF_S[min(self._vain[number], len(_BACKOFF_S) - 1)]
        if not stays:
            self._next[number] = time.monotonic() + wait
        then = "stays away" if stays else f"starts again {f'in {wait:g} s' if wait else 'at once'}"
        here = f" on machine {self._machine}" if self._machines > 1 else ""
        self._note(f"replica {number} ended: {how}; it {then}. {len(self._running)} of {len(self._lives)} run{here}")

    def _note(self, text: str) -> None:
        self._notes.log(when=time.time(), text=text)
        say(f"accel launch: {text}")

    def report(self) -> str:
        """Return who left when, why, and how long the others waited."""
        ended = [number for number in range(self._count) if self._notes.read(f"status-{number}", "") == "0"]
        lines = [f"accel launch: {len(ended)} of {self._count} replicas came to the end of the script"]
        before: list[int] = []
        for event in map(json.loads, self._notes.read("events", "").splitlines()):
            text, living = event.get("text", ""), event.get("living", before)
            gone, came = sorted({*before} - {*living}), sorted({*living} - {*before})
            parts = [f"{word} {str(each)[1:-1]}" for word, each in (("without", gone), ("with", came)) if each]
            if before and parts:
                held = f"{event['waited']:.1f} s after the one before"
                text = f"step {event['step']} was made {' and '.join(parts)}, {held}"
            lines += [f"{event['when'] - self._began:8.1f} s  {text}"] * bool(text)
            before = living
        return "\n".join(lines)

    def _outcome(self) -> int:
        found = [self._notes.read(f"status-{number}", "") for number in range(self._count)]
        statuses = [int(each) for each in found if each]
        wanted = [status for status in (0, TRY_AGAIN) if status in statuses]
        if wanted:
            return wanted[0]
        sent = self._supervisor.signals.first
        return shell_status(-sent) if sent is not None else shell_status(next(iter(statuses), 1))
