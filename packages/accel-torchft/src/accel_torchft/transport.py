"""How the state of a living replica comes to one that joins."""

from __future__ import annotations

import socket
import threading
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

from torchft.checkpointing.http_transport import HTTPTransport


class Transport(HTTPTransport[Any]):  # type: ignore[misc]  # not checked where types are
    """torchft's transport, which answers the machines of the run alone, at the address of this one, which is the first.

    torchft writes a line for each request, which is left out.
    """

    _disallowed: bool

    def __init__(self, timeout: timedelta, hosts: list[str]) -> None:
        self.host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]  # as a URL has it
        readers = self._readers = set[socket.socket]()
        # Up to whole seconds: torchft refuses requests where a socket returns another float than it was given.
        super().__init__(-(-timeout // timedelta(seconds=1)) * timedelta(seconds=1), num_chunks=0)

        class Handler(self._server.RequestHandlerClass):  # type: ignore[name-defined,misc]
            def handle(self) -> None:
                readers.add(self.connection)
                try:
                    super().handle()
                finally:
                    readers.discard(self.connection)

            def log_message(self, *_: object) -> None:
                return

        self._server.RequestHandlerClass = Handler
        self._server.__dict__.update(verify_request=partial(_is_of_run, hosts))
        # What is received is copied into the model, and not written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

    def address(self) -> str:
        """Return where states can be had."""
        port = self._server.socket.getsockname()[1]
        return f"http://{self.host}:{port}/checkpoint/"

    def disallow_checkpoint(self) -> None:
        """Let nobody read the state any more, which the next step changes.

        Readers have the timeout to come to the end. Then they are cut off: torchft would raise an error here, of which
        the replica that lives would die, and with it the state.
        """
        if self._disallowed:
            return
        self._disallowed = True
        while True:
            with suppress(TimeoutError):
                self._checkpoint_lock.w_acquire()
                return
            for connection in list(self._readers):
                with suppress(OSError):  # it has ended meanwhile
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown(self, wait: bool = True) -> None:
        """Let go of the state, which of a GPU is a copy, and end the server; torchft keeps both where nobody waits."""
        self._step, self._state_dict, self._spec, self._chunks = -1, None, None, None
        ending = threading.Thread(target=self._end_server, name="accel-transport-end", daemon=True)
        ending.start()
        if wait:
            ending.join()

    def _end_server(self) -> None:
        super().shutdown(wait=True)
        self._server.server_close()


def _is_of_run(hosts: list[str], _: object, client: tuple[Any, ...]) -> bool:
    """Return whether a request comes from a machine of the run; torchft's server listens on every address."""
    address = str(client[0]).removeprefix("::ffff:")
    return address in hosts or ip_address(address).is_loopback
