"""How the state of a living replica comes to one that joins, on the same machine."""

from __future__ import annotations

import warnings
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torchft.checkpointing.http_transport import HTTPTransport

__all__ = ["Transport"]


class Transport(HTTPTransport[Any]):  # type: ignore[misc]  # not checked where types are
    """torchft's transport, which answers this machine alone, at the address that the replica is known by.

    torchft writes a line for each request, which is left out.
    """

    def __init__(self, timeout: timedelta, host: str) -> None:
        super().__init__(timeout, num_chunks=0)
        self._host = host
        self._server.RequestHandlerClass.log_message = lambda *_: None
        self._server.__dict__.update(verify_request=_is_local)
        # What is received is copied into the model, and not written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

    def address(self) -> str:
        """Return where states can be had."""
        port = self._server.socket.getsockname()[1]
        return f"http://{self.__dict__.get('_host', '127.0.0.1')}:{port}/checkpoint/"


def _is_local(_: object, client: tuple[Any, ...]) -> bool:
    """Return whether a request comes from this machine; torchft's server listens on every address."""
    return ip_address(str(client[0]).removeprefix("::ffff:")).is_loopback
