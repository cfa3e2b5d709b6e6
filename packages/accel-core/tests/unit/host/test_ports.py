"""Network ports."""

import socket

from accel_core.host.environ import patch_environment
from accel_core.host.ports import get_free_port, is_port_in_use


def test_a_free_port_can_be_taken():
    """The port that is returned is free; once somebody listens on it, it is in use."""
    port = get_free_port()
    assert not is_port_in_use(port)
    with socket.create_server(("localhost", port)):
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
        with patch_environment(MASTER_PORT=port):
            assert is_port_in_use()
