"""Network interfaces, the name of this machine, ports, and a connection over the loopback interface."""

import fcntl
import socket
import struct
from collections.abc import Mapping

from accel_core.errors import LaunchError
from accel_core.host.ports import get_free_port
from accel_launch.launchers.preflight import check_free
from accel_verify.diagnosis.finding import DoctorFinding, from_error, ok, problem, warning

__all__ = ["check_network", "check_port"]

_TOPIC = "Network"
_SIOCGIFADDR = 0x8915
_SELECTORS = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SECONDS = 5.0


def check_network(environment: Mapping[str, str]) -> list[DoctorFinding]:
    """Examine interfaces, the machine's name, and the loopback interface by a connection over it."""
    addresses = {name: _address(name) for _, name in socket.if_nameindex()}
    shown = ", ".join(f"{name} {address or 'without an IPv4 address'}" for name, address in addresses.items())
    findings = [ok(_TOPIC, f"interfaces: {shown}")]
    findings += [
        _selection(variable, environment[variable], list(addresses))
        for variable in _SELECTORS
        if environment.get(variable)
    ]
    return [*findings, _own_name(), _loopback()]


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel's names have 15 characters.
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
        return socket.inet_ntoa(found[20:24])


def _selection(variable: str, value: str, interfaces: list[str]) -> DoctorFinding:
    """Check that a variable leaves an interface; NCCL takes prefixes of names, = for exact names and ^ to exclude."""
    words, nccl = value.split(","), variable.startswith("NCCL")
    others, exact = nccl and value.startswith("^"), not nccl or value.lstrip("^").startswith("=")
    words = [word.lstrip("^=") for word in words] if nccl else words
    named = [name for name in interfaces if any(name == word if exact else name.startswith(word) for word in words)]
    missing = [] if nccl else [word for word in words if word not in interfaces]  # gloo needs all of them
    left = [name for name in interfaces if name not in named] if others else named
    if left and not missing:
        return ok(_TOPIC, f"{variable}={value} leaves {', '.join(left)}")
    return problem(
        _TOPIC,
        f"{variable} does not name an interface of this machine; got {value}",
        f"Set it to one of {', '.join(interfaces)}, or unset it.",
    )


def _own_name() -> DoctorFinding:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]  # gloo looks it up in the same way
    except OSError as error:
        return warning(
            _TOPIC,
            f"the machine's name {name} has no address; got {error.strerror or error}",
            "Add it to /etc/hosts; several machines find each other by name.",
        )
    return ok(_TOPIC, f"the machine's name {name} has the address {found}")


def _loopback() -> DoctorFinding:
    """Connect over the loopback interface as the ranks of one machine do."""
    sent = b"accel"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_SECONDS)
            with socket.create_connection(server.getsockname(), timeout=_SECONDS) as one:
                other, _ = server.accept()
                with other:
                    one.sendall(sent)
                    right = other.recv(len(sent), socket.MSG_WAITALL) == sent
    except OSError as error:
        return problem(
            _TOPIC,
            f"a connection over 127.0.0.1 fails; got {error.strerror or error}",
            "Set up the loopback interface (`ip link set lo up`), and let the firewall pass it.",
        )
    if not right:
        return problem(_TOPIC, "a connection over 127.0.0.1 loses data", "Look for a proxy on the loopback interface.")
    return ok(_TOPIC, f"a connection over 127.0.0.1 works, and port {get_free_port()} is free")


def check_port(port: int, source: str) -> DoctorFinding:
    """Examine whether a requested port is free."""
    try:
        check_free(port)
    except LaunchError as error:
        return from_error(_TOPIC, error)._replace(
            what=f"port {port} from {source} is taken", remedy="End the program that uses it, or choose another port."
        )
    return ok(_TOPIC, f"port {port} from {source} is free")
