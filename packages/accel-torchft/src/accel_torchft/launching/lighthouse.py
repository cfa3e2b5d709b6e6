"""The process that knows which replicas are there: torchft's lighthouse, started by the launcher.

python -m accel_torchft.launching.lighthouse HOST:PORT FEWEST
"""

import signal
import sys

HEARTBEAT_MS = 1500
"""How long a replica may be silent before the others go on without it."""

JOIN_MS = 60_000
"""How long the others wait for a replica that lives and does not come to a step."""


def main() -> None:
    """Serve until a signal comes."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=sys.argv[1],
        min_replicas=int(sys.argv[2]),
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
