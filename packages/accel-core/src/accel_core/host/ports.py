"""Network ports of this machine."""

from __future__ import annotations

import socket

__all__ = ["get_free_port"]


def get_free_port() -> int:
    """Return a port that nothing uses now; another program may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
