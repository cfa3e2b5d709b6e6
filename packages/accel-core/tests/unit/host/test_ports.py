"""Network ports."""

import socket

from accel_core.host.ports import get_free_port


def test_a_free_port_can_be_taken() -> None:
    """Somebody can listen on the port that is returned."""
    port = get_free_port()
    with socket.create_server(("localhost", port)) as server:
        assert server.getsockname()[1] == port
