"""The other machines of a run: compared when they connect, and told of a failure on any of them."""

import contextlib
import socket
import threading
from typing import Any

from accel_launch.launchers.preflight import check_agreement, facts_of_machine
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.supervisor import Supervisor

__all__ = ["GRACE_S", "OtherMachines"]

GRACE_S = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

_FAILED = "accel/failed"


class OtherMachines:
    """The launchers of the other machines, reached through the store in which the machines met."""

    def __init__(self, settings: Settings, supervisor: Supervisor) -> None:
        self.failure = ""
        self._settings = settings
        self._supervisor = supervisor
        self._store: Any = None
        self._announced = False
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
            self._store = store
            self._listener = threading.Thread(target=self._listen, name="accel-machines", daemon=True)
            self._listener.start()

    def announce(self, rank: int) -> None:
        """Tell the others that a rank of this machine failed, unless one of theirs failed first."""
        if self._store is not None and not self.failure:
            self._announced = True
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAILED, f"rank {rank} failed on {socket.gethostname()}")

    def close(self) -> None:
        """End listening."""
        self._over.set()
        if self._listener is not None:
            self._listener.join(
                GRACE_S
            )  # a thread that is inside torch's store when Python ends takes the process down

    def _listen(self) -> None:
        while not self._over.wait(1.0):
            failure = self._heard()
            if not failure:
                continue
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
            return "machine 0 is gone"  # it holds the store
