"""Interfaces, and ports that are taken."""

import socket

import pytest

from accel_verify.diagnosis.network import check_network, check_port

EVERY = "^" + ",".join(name for _, name in socket.if_nameindex())


@pytest.mark.parametrize(
    ("variable", "said", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "ib7", "problem"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^ib7", "ok"),
        ("NCCL_SOCKET_IFNAME", EVERY, "problem"),
    ],
)
def test_variables_that_choose_an_interface(variable: str, said: str, state: str) -> None:
    """The beginning of a name leaves an interface, behind ^ all others; where none is left, that is a problem."""
    first, *_ = findings = check_network({variable: said})
    assert "lo 127.0.0.1" in first.what
    [found] = [finding for finding in findings if finding.what.startswith(variable)]
    assert (found.state, "or unset it" in found.remedy) == (state, state == "problem")


def test_a_port_that_is_taken() -> None:
    """A port with a listener is a problem that names who asks for it; afterwards it is free."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = check_port(port, "ACCEL_MAIN_PROCESS_PORT")
    assert (found.state, found.what) == ("problem", f"port {port} from ACCEL_MAIN_PROCESS_PORT is taken")
    assert check_port(port, "x").state == "ok"
