"""The other machines of a run: compared when they connect, and told of a failure on any of them."""

import contextlib
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from accel_launch.launchers.preflight import check_agreement, facts_of_machine
from accel_launch.settings.reading import shortened
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.outcome import without_crash
from accel_launch.supervision.supervisor import Supervisor

GRACE_S = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

_FAILED, _HEARD, _HOST = "accel/failed", "accel/heard", "accel/host"


class OtherMachines:
    """The launchers of the other machines, reached through the store in which the machines met."""

    def __init__(self, settings: Settings, supervisor: Supervisor) -> None:
        self.failure = ""
        self._settings = settings
        self._supervisor = supervisor
        self._store: Any = None
        self._machine, self._machines = 0, 1
        self._announced = False
        self._lost = False
        self._over = threading.Event()
        self._listener: threading.Thread | None = None

    def met(self, store: object, machine: int, machines: int) -> None:
        """Compare the machines that met, and listen for the failure of another one.

        Raises:
            LaunchError: A machine has another version, script or number of processes.
        """
        layout = self._settings.layout
        facts = facts_of_machine(self._settings.script, layout.processes)
        elastic = layout.fewest_machines != layout.machines
        check_agreement(store, machine, machines, facts, elastic=elastic)
        if not self._settings["max_restarts"]:  # with restarts, torch's agents agree on what follows a failure
            self._store, self._machine, self._machines = store, machine, machines
            self._store.set(f"{_HOST}/{machine}", socket.gethostname())
            self._listener = threading.Thread(target=self._listen, name="accel-machines", daemon=True)
            self._listener.start()

    def announce(self, rank: int) -> None:
        """Tell the others that a rank of this machine failed, unless one of theirs failed first."""
        if self._store is None or self.failure or self._announced:
            return
        self._announced = True
        printed = bytes(self._supervisor.streams.ranks[rank].tail).decode(errors="replace")
        lines = (without_crash(printed).strip() or printed.strip()).splitlines()
        last = f": {shortened(lines[-1].strip())}" if lines else ""
        logs = self._settings["log_dir"]
        where = f"; its log there is {Path(logs).absolute() / f'rank{rank}.stderr.log'}" if logs else ""
        mine = f"rank {rank} failed on machine {self._machine} ({socket.gethostname()}){last}{where}"
        try:
            first = self._store.compare_set(_FAILED, "", mine).decode()
        except RuntimeError:
            first = self._gone()
        self.failure = "" if first == mine else first

    def close(self) -> None:
        """End listening, after the other machines have heard of a failure of this one, or are taken for lost."""
        if self._announced:
            self._find_lost()
        self._acknowledge()
        self._over.set()
        if self._listener is not None:
            self._listener.join(
                GRACE_S
            )  # a thread that is inside torch's store when Python ends takes the process down

    def end_job(self) -> None:
        """End the job of SLURM around a run that lost a machine: srun would wait for that machine."""
        job = self._settings.inherited.get("ACCEL_SLURM_JOB")
        if self._lost and job:
            subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=False)

    def _acknowledge(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{_HEARD}/{self._machine}", "")

    def _find_lost(self) -> None:
        """Name a machine that does not answer: its end is then why ranks of this one failed."""
        deadline = time.monotonic() + GRACE_S
        silent = [machine for machine in range(self._machines) if machine != self._machine]
        try:
            while silent and time.monotonic() < deadline:
                silent = [machine for machine in silent if not self._store.check([f"{_HEARD}/{machine}"])]
                time.sleep(0.1 * bool(silent))
            hosts = [f"machine {machine} ({self._store.get(f'{_HOST}/{machine}').decode()})" for machine in silent]
        except RuntimeError:  # machine 0 waited for the others, and left
            return
        if silent:
            self.failure = f"{', '.join(hosts)} does not answer"
            self._lost = True

    def _listen(self) -> None:
        while not self._over.wait(1.0):
            failure = self._heard()
            if not failure:
                continue
            self._acknowledge()
            if self._announced:  # it was ours
                return
            self.failure = failure
            if not self._over.wait(2.0):  # usually the ranks here notice it themselves, and report more about it
                self._supervisor.terminate()
                self._over.wait(GRACE_S)
                self._supervisor.kill()
            return

    def _heard(self) -> str:
        try:
            return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""
        except RuntimeError:
            return self._gone()

    def _gone(self) -> str:
        return f"machine 0 ({self._settings['main_process_ip']}) is gone"  # it holds the store
