"""Interfaces, the loopback connection, and ports that are taken."""

import socket

import pytest

from accel_verify.diagnosis.network import check_network, check_port


def test_this_machine_meets_itself() -> None:
    """Without variables the interfaces are listed, and a connection over the loopback interface works."""
    first, *_, last = check_network({})
    assert "lo 127.0.0.1" in first.what
    assert (last.state, last.what.partition(",")[0]) == ("ok", "a connection over 127.0.0.1 works")


@pytest.mark.parametrize(
    ("variable", "said", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "ib7", "problem"),
        ("GLOO_SOCKET_IFNAME", "lo,ib7", "problem"),
        ("GLOO_SOCKET_IFNAME", "l", "problem"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "problem"),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^ib7", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib7", "problem"),
    ],
)
def test_variables_that_choose_an_interface(variable: str, said: str, state: str) -> None:
    """Gloo takes whole names; NCCL beginnings, whole ones behind =, and all others behind ^."""
    [found] = [finding for finding in check_network({variable: said}) if finding.what.startswith(variable)]
    assert found.state == state


def test_no_interface_is_left() -> None:
    """A variable that excludes every interface is a problem."""
    everything = ",".join(name for _, name in socket.if_nameindex())
    [found] = [each for each in check_network({"NCCL_SOCKET_IFNAME": f"^{everything}"}) if "NCCL" in each.what]
    assert (found.state, "or unset it" in found.remedy) == ("problem", True)


def test_a_port_that_is_taken() -> None:
    """A port with a listener is a problem that names who asks for it; afterwards it is free."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = check_port(port, "ACCEL_MAIN_PROCESS_PORT")
    assert (found.state, found.what) == ("problem", f"port {port} from ACCEL_MAIN_PROCESS_PORT is taken")
    assert check_port(port, "x").state == "ok"
