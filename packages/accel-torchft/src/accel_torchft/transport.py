"""How the state of a living replica comes to one that joins."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

from torchft.checkpointing.http_transport import HTTPTransport

__all__ = ["Transport"]


class Transport(HTTPTransport[Any]):  # type: ignore[misc]  # not checked where types are
    """torchft's transport, at the address that the replica is known by, and without a line for each request."""

    def __init__(self, timeout: timedelta, host: str) -> None:
        super().__init__(timeout, num_chunks=0)
        self._host = host
        self._server.RequestHandlerClass.log_message = lambda *_: None
        # What is received is copied into the model, and not written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

    def address(self) -> str:
        """Return where states can be had."""
        port = self._server.socket.getsockname()[1]
        return f"http://{self.__dict__.get('_host', 'localhost')}:{port}/checkpoint/"
