"""Where the agents of a run meet, round after round, and where their ranks meet in each round.

Ranks exchange their addresses in a store. torch's handlers give the ranks of every round the same one, so ranks that
are started again may read the addresses of processes that have ended. Here every round has a store without them.
"""

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from accel_core.errors import LaunchError
from accel_core.process.store import loopback_store

__all__ = ["LocalRendezvous", "MachinesRendezvous"]

_TIMEOUT = timedelta(seconds=300)


class LocalRendezvous(RendezvousHandler):
    """Meeting point of one machine: a store that other machines cannot reach, on a port that the system chose.

    Raises:
        LaunchError: The port cannot be used.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self.address: str | None = "127.0.0.1"
        self._run_id = run_id
        self._round = 0
        try:
            self._store = loopback_store(port, _TIMEOUT)
        except (OSError, OverflowError, RuntimeError) as error:
            raise LaunchError(
                f"The processes cannot connect on port {port}; got: {str(error).splitlines()[0]}. Give "
                "another port, or none to get a free one."
            ) from None

    @property
    def use_agent_store(self) -> bool:
        """Return whether ranks meet in the store of an agent."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet for the next round of attempts."""
        if self._round:
            self._empty()
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        # The same store serves the ranks.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self._store.port))

    def _empty(self) -> None:
        """Forget what the ranks of earlier rounds wrote."""
        if not hasattr(self._store, "list_keys"):
            # torch 2.6 cannot list the keys of a store, so ranks meet in a new one, on a port that the system chooses.
            self._store = loopback_store(0, _TIMEOUT)
            return
        for key in self._store.list_keys():
            self._store.delete_key(key)

    def is_closed(self) -> bool:
        """Return whether joining is closed."""
        return False

    def set_closed(self) -> None:
        """Close the rendezvous to new members."""
        return None

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """End the rendezvous for all machines."""
        return True

    def leave(self) -> None:
        """Leave the run; on one machine there is nobody else in it."""


class MachinesRendezvous(RendezvousHandler):
    """Meeting point of several machines: torch's own, but from the second round on with a new store for the ranks."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        machines: tuple[int, int],
        address: str | None,
        configuration: Mapping[str, Any],
    ) -> None:
        fewest, most = machines
        self._inner = rendezvous_registry.get_rendezvous_handler(
            RendezvousParameters(backend, endpoint, run_id, fewest, most, address, **configuration)
        )
        self.address = address
        self._round = 0
        self._server: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Return whether ranks meet in the store of an agent."""
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return str(self._inner.get_backend())

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines for the next round of attempts."""
        info: RendezvousInfo = self._inner.next_rendezvous()
        self._round += 1
        if self._round == 1 or not self.use_agent_store:  # the first round has nothing to forget
            return info
        # the static rendezvous has one store for all rounds; the others have put the round's number into its keys
        store = PrefixStore(f"round{self._round}", info.store) if self.get_backend() == "static" else info.store
        port = None
        if info.rank == 0:
            host = self.address or socket.getfqdn()  # this is what torch sends the others as the address of rank 0
            self._server = TCPStore(host, 0, None, True, _TIMEOUT, False)
            port = self._server.port
        meeting = RendezvousStoreInfo.build(info.rank, store, self.address, server_port=port)
        return RendezvousInfo(store, info.rank, info.world_size, meeting)

    def is_closed(self) -> bool:
        """Return whether joining is closed."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Close the rendezvous to new members."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """End the rendezvous for all machines."""
        return bool(self._inner.shutdown())

    def leave(self) -> None:
        """Leave the run to the other machines, and end the thread that tells them that this one is alive.

        A thread of Python that is in torch's store when Python ends takes the process down with SIGABRT.
        """
        stop = getattr(self._inner, "_stop_heartbeats", None)  # torch's static one has no such thread
        if stop is not None:
            stop()
