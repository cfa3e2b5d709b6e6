"""Where the agents of a run meet, round after round, and where their ranks meet in each round.

Ranks exchange their addresses in a store. torch's handlers give the ranks of every round the same one, so ranks that
are started again may read the addresses of processes that have ended. Here every round has a store without them.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accel_core.errors import LaunchError
from accel_core.host.environ import write
from accel_core.process.store import loopback_store

_TIMEOUT_S = 300


class LocalRendezvous(StaticTCPRendezvous):
    """Meeting point of one machine: a store that other machines cannot reach, on a port that the system chose."""

    def __init__(self, run_id: str, port: int) -> None:
        super().__init__("127.0.0.1", port, 0, 1, run_id, _TIMEOUT_S)
        self._round = 0
        try:
            self._met = loopback_store(port, self.timeout)
        except (OSError, OverflowError, RuntimeError) as error:
            raise LaunchError(
                f"The processes cannot connect on port {port}; got: {str(error).splitlines()[0]}. Give "
                "another port, or none to get a free one."
            ) from None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet for the next round of attempts."""
        if self._round:  # ranks that start again find nothing of what those before them wrote
            self._met = loopback_store(0, self.timeout)
        self._round += 1
        store = PrefixStore(f"{self.run_id}/{self._round}", self._met)
        # The same store serves the ranks.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, self._met.port))


class NumberedMachines(StaticTCPRendezvous):
    """Meeting point of machines that know their numbers, in a store on machine 0, all of which have to come.

    torch's own static rendezvous waits for a number of connections. It can name no machine that is missing, and takes a
    machine of another run for one of its own.
    """

    _round = 0
    _met: TCPStore | None = None
    _server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines the first time; later the ranks get a new store of machine 0.

        Raises:
            LaunchError: A machine does not come in time, or one with the number of this one is there already.
        """
        self._met = self._met or self._meet()
        self._round += 1
        store, port = PrefixStore(f"{self.run_id}/{self._round}", self._met), self.master_port
        if self._round > 1:
            if self.rank == 0:
                self._server = TCPStore(self.master_addr, 0, None, True, timedelta(seconds=_TIMEOUT_S), False)
                store.set("port", str(self._server.port))
            port = int(store.get("port"))
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, port))

    def _meet(self) -> TCPStore:
        deadline = time.monotonic() + self.timeout.total_seconds()
        host, port, own = self.master_addr, self.master_port, self.rank == 0
        store = TCPStore(host, port, None, own, self.timeout, wait_for_workers=False, multi_tenant=True)
        keys = [f"accel/{self.run_id}/machine/{machine}" for machine in range(self.world_size)]
        mine = f"{socket.gethostname()} {uuid.uuid4().hex}"
        there = store.compare_set(keys[self.rank], "", mine).decode()
        if there != mine:
            raise LaunchError(
                f"Two launchers have the number of machine {self.rank}; the other one runs on {there.split()[0]}. "
                f"Give each machine its own --machine-rank, and each run its own port: {host}:{port} has this one."
            )
        try:
            while not store.check(keys):
                self._give_up_if_over(store, keys, deadline)
                time.sleep(0.1)
        except RuntimeError as error:
            gone = f"Machine 0 at {host}:{port} is gone; got {self.rank} as the number of this one. See its error."
            raise error if isinstance(error, LaunchError) else LaunchError(gone) from None
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store went with machine 0
                store.delete_key(keys[self.rank])  # so that nobody begins without this one
            raise
        return store

    def _give_up_if_over(self, store: TCPStore, keys: list[str], deadline: float) -> None:
        """Raise an error that names the missing machines, if this one or another has waited for too long."""
        given_up = f"accel/{self.run_id}/given up"
        if not store.check([given_up]):
            if time.monotonic() < deadline:
                return
            store.set(given_up, ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key])))
            time.sleep(float(self.rank == 0))  # the others read it from here
        missing = store.get(given_up).decode()
        seconds = self.timeout.total_seconds()
        raise LaunchError(
            f"Not all {len(keys)} machines came within {seconds:.0f} s; got none with the number {missing}. Look "
            "there for an error, and that `accel launch` was started with that --machine-rank; --rdzv-conf "
            "timeout=SECONDS waits longer."
        )


def machines_rendezvous(
    backend: str,
    endpoint: str,
    run_id: str,
    machines: tuple[int, int],
    address: str | None,
    machine: int | None,
    more: Mapping[str, Any],
) -> RendezvousHandler:
    """Return the meeting point of several machines: of those that know their numbers, or torch's own.

    Without the number of this machine, torch guesses from its names and addresses whether the store belongs here.
    """
    fewest, most = machines
    numbered = {} if machine is None else {"rank": machine, "is_host": str(machine == 0)}
    configuration = {"timeout": 900, **numbered, **more}  # seconds that machines may start apart
    if backend == "static":
        host, _, port = endpoint.rpartition(":")
        seconds = int(float(configuration["timeout"]))
        return NumberedMachines(host, int(port), int(configuration.get("rank", 0)), most, run_id, seconds)
    write("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # rank 0 then has a new store in every round
    found: RendezvousHandler = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(backend, endpoint, run_id, fewest, most, address, **configuration)
    )
    return found


def leave(rendezvous: RendezvousHandler) -> None:
    """Leave a run to the other machines, and end the thread that tells them that this one is alive.

    A thread of Python that is in torch's store when Python ends takes the process down with SIGABRT.
    """
    stop = getattr(rendezvous, "_stop_heartbeats", None)  # only torch's dynamic one has such a thread
    if stop is not None:
        stop()
