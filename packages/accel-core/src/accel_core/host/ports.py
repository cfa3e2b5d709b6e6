"""Network ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def get_free_port() -> int:
    """Return a port that nothing uses now; another program may take it before you do."""
    # Not one of those that systems give to whoever connects: between now and its use, none of these is taken by chance.
    for port in random.SystemRandom().sample(range(15_000, 30_000), 20):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
