"""Checks between machines before processes start, so that a wrong address costs seconds instead of a timeout."""

import contextlib
import errno
import hashlib
import json
import platform
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accel_core.errors import LaunchError

_CONNECT_TIMEOUT_S = 300.0


def check_main_machine(
    host: str, port: int, *, own: bool, seconds: float = _CONNECT_TIMEOUT_S, named_later: bool = False
) -> None:
    """Check that machine 0 can be reached in so many seconds, or, where it is this one, that its port is free.

    `named_later` says that its name may not be known yet, as that of a pod which is about to be started.
    """
    deadline = time.monotonic() + seconds
    announced = False
    while True:
        try:
            if own:  # nobody listens there before its own agent does
                socket.getaddrinfo(host, port)
                check_free(port)
            else:
                socket.create_connection((host, port), timeout=3).close()
            return
        except OSError as error:
            trouble = error.strerror or str(error)
            if isinstance(error, socket.gaierror) and not named_later:
                raise LaunchError(
                    f"The address of machine 0 is unknown; {host!r} gives: {trouble}. Check --main-process-ip."
                ) from None
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Machine 0 cannot be reached at {host}:{port}; got for {seconds:.0f} s: "
                f"{trouble}. Check --main-process-ip, --main-process-port, the firewall, and that machine 0 was "
                "started."
            )
        if not announced:
            print(f"accel launch: waiting for machine 0 at {host}:{port} ({trouble})", file=sys.stderr, flush=True)
            announced = True
        time.sleep(0.5)


def own_address(host: str, port: int) -> str | None:
    """Return the address of this machine on the network that reaches machine 0, or None."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(place)  # UDP sends nothing, but the system chooses an interface
                return str(probe.getsockname()[0])
    return None


def check_free(port: int) -> None:
    """Check that nothing on this machine uses a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that just ended does not occupy it
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"Port {port} of this machine is taken; machines cannot connect to it. Pass another "
                    "--main-process-port on every machine."
                ) from None


def facts_of_machine(script: str | None, processes: int) -> dict[str, Any]:
    """Return what all machines of a run must agree about."""
    path = Path(script or "")
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "accel-core": version("accel-core"),
        "accel-launch": version("accel-launch"),
        # Copies may be outdated on one machine.
        "script": hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else str(script),
        "processes": processes,
    }


def check_agreement(store: Any, rank: int, size: int, facts: dict[str, Any], *, elastic: bool) -> None:
    """Compare the machines' facts through the store in which they met."""
    store.set(f"accel/facts/{rank}", json.dumps(facts))
    everybody = {machine: json.loads(store.get(f"accel/facts/{machine}")) for machine in range(size)}
    for name, value in everybody[0].items():
        if name == "processes" and elastic:  # machines may differ in size there
            continue
        others = {machine: found[name] for machine, found in everybody.items() if found[name] != value}
        if others:
            differing = ", ".join(f"{found} on machine {machine}" for machine, found in others.items())
            raise LaunchError(
                f"The machines differ in {name}; got {value} on machine 0 and {differing}. Give all machines the same, "
                "then start again."
            )
