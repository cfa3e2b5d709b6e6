"""Network ports of this machine."""

from __future__ import annotations

import socket

from accel_core.host import environ

__all__ = ["get_free_port", "is_port_in_use"]

_USUAL_PORT = 29500


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether something listens on a port of this machine.

    Args:
        port: The port; without one, MASTER_PORT, or 29500 where that is not set.
    """
    number = environ.integer("MASTER_PORT", _USUAL_PORT) if port is None else int(port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", number or _USUAL_PORT)) == 0


def get_free_port() -> int:
    """Return a port that nothing uses now; another program may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
