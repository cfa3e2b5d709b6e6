"""The frame's own behavior on real gloo ranks."""

import pytest
import torch

from accel_core.comm import collectives, control, objects, transport
from accel_core.errors import CollectiveError, RankDisagreementError, RemoteRankError
from accel_core.process import world as process_world
from accel_core.process.world import ensure
from accel_core.testing import world


def through_device_memory(here):
    """Make the transport treat its buffers as memory that the host cannot read in place, as on an accelerator."""
    opened = transport.open_transport(here)
    opened.on_host = False
    opened._allocate(opened.size)
    return opened


def opened_again(here):
    """Return the transport as the next operation finds it."""
    with transport.participate(here, "look") as opened:
        return opened


@world(2)
def test_buffers_that_the_host_cannot_read():
    """Headers, payloads, failures and disagreements also travel when each has to be copied to and from a device."""
    here = ensure()
    through_device_memory(here)
    assert collectives.gather({"a": torch.tensor([here.rank])})["a"].tolist() == [0, 1]
    assert objects.gather_object([here.rank, "x" * 100_000])[2:] == [1, "x" * 100_000]
    assert collectives.gather(torch.full((200_000,), here.rank)).sum().item() == 200_000
    assert collectives.broadcast(torch.tensor([here.rank]), 1).item() == 1
    with pytest.raises(RankDisagreementError, match=r"int64\[1\].*\n.*int64\[2\]"):
        collectives.gather(torch.ones(1 + here.rank, dtype=torch.int64))
    failure = OSError("disk full") if here.rank else None
    with pytest.raises(OSError if failure else RemoteRankError, match="disk full"):
        control.agree(failure, "save")
    control.agree(None, "save")


@world(2)
def test_reduce_is_checked_once_where_checking_stalls_the_device():
    """Away from the CPU a reduction exchanges its digest the first time and is one all_reduce afterwards."""
    here = ensure()
    opened = through_device_memory(here)
    exchanged = []
    real = opened.exchange
    opened.exchange = lambda message: (exchanged.append(opened._current.operation), real(message))[1]
    for _ in range(3):
        assert collectives.reduce(torch.tensor([1.0 + here.rank])).tolist() == [1.5]
    assert exchanged == ["reduce(mean)"]
    collectives.reduce(torch.tensor([1.0, 2.0]))
    assert exchanged == ["reduce(mean)"] * 2
    with pytest.raises(RankDisagreementError):
        collectives.reduce(torch.ones(3 + here.rank))


@world(2)
def test_frames_follow_what_operations_need():
    """A nest that is gathered again travels in the frame; after small operations the frame is small again."""
    here = ensure()
    size = 100_000
    opened = transport.open_transport(here)
    assert opened.capacity < size
    collectives.gather(torch.zeros(size, dtype=torch.uint8))
    assert opened_again(here).capacity >= size
    for _ in range(8):
        collectives.gather(torch.zeros(1))
    assert opened_again(here).capacity < 5_000
    collectives.gather(torch.zeros(transport.largest_frame(2), dtype=torch.uint8))
    assert opened_again(here).capacity < 5_000, "what fits no frame does not make it grow"


@world(2)
def test_after_the_group_was_left():
    """An operation without a process group says so; a new group works."""
    here = ensure()
    collectives.gather(torch.ones(1))
    torch.distributed.destroy_process_group()
    with pytest.raises(CollectiveError, match="destroyed or never made"):
        collectives.gather(torch.ones(1))
    process_world.forget()
    folder = process_world.environ.text("ACCELERATE_DEBUG_RDV_FILE")
    process_world.environ.write("ACCELERATE_DEBUG_RDV_FILE", f"{folder}-again")
    assert collectives.gather(torch.tensor([ensure().rank])).tolist() == [0, 1]
    assert here.rank == ensure().rank
