"""Who can reach the store in which the ranks of one machine meet."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from accel_core.comm import objects
from accel_core.errors import ConfigurationError
from accel_core.host.ports import get_free_port
from accel_core.process import rendezvous
from accel_core.process import world as process
from accel_core.process.world import destroy, ensure
from accel_testing.world import run, world

STRANGER = "127.0.0.2"
"""An address of this machine that the ranks do not meet at, as the one that its network knows."""


def answers(address: str, host: str) -> bool:
    """Return whether something listens on the ranks' port at an address."""
    port = int(os.environ["MASTER_PORT"])
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
            client.connect((address, port))
    except ConnectionRefusedError:
        return False
    return True


def meet(reached: bool, host: str) -> None:
    """Join the others, and ask at the addresses."""
    os.environ.pop("ACCELERATE_DEBUG_RDV_FILE")
    here = ensure()
    assert objects.gather_object([here.rank]) == list(range(here.size))
    assert answers(host, host)
    assert answers("::ffff:127.0.0.2" if ":" in host else STRANGER, host) is reached
    objects.gather_object([here.rank])
    destroy()


@pytest.mark.skipif(sys.platform != "linux", reason="every address of 127.0.0.0/8 is this machine's on Linux")
@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, "127.0.0.1"),
        ({"MASTER_ADDR": "localhost"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "::1"}, "::1"),
    ],
)
def test_the_store_of_one_machine_is_reached_from_it_alone(variables: dict[str, str], host: str) -> None:
    """Where ranks meet at a loopback address, the store listens there alone."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    port = {"MASTER_PORT": str(get_free_port())}
    run(meet, 2, (False, host), environment={**port, **variables})


def test_ranks_of_unknown_machines_are_waited_for_everywhere() -> None:
    """Where nobody says that all ranks are here, a loopback address may be rank 0's alone: all can reach the store."""
    variables = {"MASTER_PORT": str(get_free_port()), "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": ""}
    run(meet, 2, (True, "127.0.0.1"), environment=variables)


@world(3)
def test_a_rank_ends_when_all_are_connected(tmp_path: Path) -> None:
    """One that has nothing to do leaves no other behind that still connects to it."""
    join = dist.init_process_group

    def late(*args: object, **kwargs: object) -> None:
        join(*args, **kwargs)
        time.sleep(0.3)
        assert not (tmp_path / "left").exists()

    if int(os.environ["RANK"]) == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", late)
            ensure()
    else:
        ensure()
        destroy()
        (tmp_path / "left").touch()


@world(2)
def test_ranks_of_one_device_are_refused_together():
    """Two ranks that see one device each may have different ones; where it is the same one, both are refused."""
    rank, place = ensure().rank, rendezvous.locate()
    process._refuse_shared(place, "cuda:0", f"GPU-{rank}", sees=1)
    assert dist.is_initialized()
    process._join_key += "/again"
    with pytest.raises(ConfigurationError, match=r"ranks [01] and [01] on cuda:0, where 1 can be seen.*--cpu.*gloo"):
        process._refuse_shared(place, "cuda:0", "GPU-0", sees=1)
    assert not dist.is_initialized()
