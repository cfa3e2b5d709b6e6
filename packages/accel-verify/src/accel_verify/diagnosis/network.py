"""Network interfaces, the name of this machine, and ports."""

import fcntl
import socket
import struct
from collections.abc import Mapping

from accel_core.errors import LaunchError
from accel_launch.launchers.preflight import check_free
from accel_verify.diagnosis.finding import DoctorFinding, from_error, ok, problem, warning

_TOPIC = "Network"
_SIOCGIFADDR = 0x8915
_SELECTORS = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_network(environment: Mapping[str, str]) -> list[DoctorFinding]:
    """Examine interfaces and the machine's name."""
    addresses = {name: _address(name) for _, name in socket.if_nameindex()}
    shown = ", ".join(f"{name} {address or 'without an IPv4 address'}" for name, address in addresses.items())
    findings = [ok(_TOPIC, f"interfaces: {shown}")]
    findings += [
        _selection(variable, environment[variable], list(addresses))
        for variable in _SELECTORS
        if environment.get(variable)
    ]
    return [*findings, _own_name()]


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel's names have 15 characters.
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
        return socket.inet_ntoa(found[20:24])


def _selection(variable: str, value: str, interfaces: list[str]) -> DoctorFinding:
    """Check that a variable leaves an interface: by the beginnings of names, or behind ^ all others."""
    named = [name for name in interfaces if name.startswith(tuple(value.lstrip("^=").split(",")))]
    left = [name for name in interfaces if name not in named] if value.startswith("^") else named
    if left:
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


def check_port(port: int, source: str) -> DoctorFinding:
    """Examine whether a requested port is free."""
    try:
        check_free(port)
    except LaunchError as error:
        return from_error(_TOPIC, error)._replace(
            what=f"port {port} from {source} is taken", remedy="End the program that uses it, or choose another port."
        )
    return ok(_TOPIC, f"port {port} from {source} is free")
