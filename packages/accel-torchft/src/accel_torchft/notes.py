"""What replicas and launchers of a run tell each other, in a store that the launcher of machine 0 serves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented there

from accel_core.errors import LaunchError

_T = TypeVar("_T")
_TIMEOUT = timedelta(seconds=300)
"""How long others may take to come, or to write what is waited for."""


def serve(listener: socket.socket) -> TCPStore:
    """Serve a store at a socket that listens already."""
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, None, True, _TIMEOUT, False, True, listener.detach())


class Notes:
    """Texts by name, which all processes of a run write and read.

    Args:
        place: Host and port of the store.

    Raises:
        LaunchError: The launcher that serves the store has ended.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        host, _, port = place.rpartition(":")
        store = self._do(TCPStore, host, int(port), None, False, _TIMEOUT, wait_for_workers=False)
        self._store = PrefixStore("replicas", store)

    def _do(self, operation: Callable[..., _T], *words: object, **options: object) -> _T:
        try:
            return operation(*words, **options)
        except DistError:
            raise LaunchError(
                f"The launcher of machine 0 keeps what replicas tell each other; got no answer at {self._place}. See "
                "its own error, and start the run again."
            ) from None

    def write(self, name: str, text: str = "") -> None:
        """Write a text."""
        self._do(self._store.set, name, text)

    def has(self, *names: str) -> bool:
        """Return whether all of these texts are written."""
        return self._do(self._store.check, [*names])

    def read(self, name: str, default: str | None = None) -> str:
        """Return a text; where nobody wrote it, the default, or without one wait for it."""
        if default is not None and not self.has(name):
            return default
        return self._do(self._store.get, name).decode()

    def first_to(self, what: str) -> bool:
        """Return whether nobody asked this before."""
        return self._do(self._store.add, what, 1) == 1

    def log(self, **event: object) -> None:
        """Add an event to those of the run."""
        append = self._store.append  # type: ignore[attr-defined]  # torch's stub leaves it out
        self._do(append, "events", json.dumps(event) + "\n")
