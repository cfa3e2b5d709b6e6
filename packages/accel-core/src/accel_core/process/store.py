"""The key-value store in which the ranks of one machine meet, where no other machine can reach it.

The store has no password, and torch's own listens on every address of the machine; this one listens on loopback.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public; its module does not list them
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from accel_core.host import environ
from accel_core.process.rendezvous import ProcessEnv

LOOPBACK_METHOD = "accel-loopback://"
"""The `init_method` of a rank 0 whose store listens on loopback; the other ranks use `env://`."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def loopback_store(port: int, timeout: timedelta, host: str = "127.0.0.1", size: int | None = None) -> TCPStore:
    """Start a store that programs of this machine alone can reach.

    Raises:
        OSError: The port cannot be used.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    arguments = host, port, size, True, timeout, size is not None
    return TCPStore(*arguments, multi_tenant=True, master_listen_fd=listener.detach())


def listens_on_loopback(place: ProcessEnv) -> bool:
    """Return whether this process starts the store of a run on one machine that meets at a loopback address."""
    served = environ.text("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher, which has the store
    # Schedulers may give a loopback address to rank 0 alone, so the environment has to say that all ranks are on this
    # machine.
    together = place.counted and place.local_size == place.size
    return place.rank == 0 and together and not served and environ.text("MASTER_ADDR") in _LOOPBACK


def _meet(_url: str, timeout: timedelta, **_arguments: object) -> Iterator[tuple[Store, int, int]]:
    host, port, size = environ.text("MASTER_ADDR"), environ.integer("MASTER_PORT"), environ.integer("WORLD_SIZE")
    try:
        store = loopback_store(port or 0, timeout, host or "127.0.0.1", size)
    except (OSError, OverflowError):
        # torch finds a store that this process has there already, and has words for whatever else is wrong
        yield from rendezvous("env://", timeout=timeout)
        return
    yield store, 0, size or 1


register_rendezvous_handler(LOOPBACK_METHOD.partition(":")[0], _meet)  # type: ignore[no-untyped-call]
