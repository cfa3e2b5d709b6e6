"""The frame's own behavior on real gloo ranks."""

import contextlib
from datetime import timedelta

import pytest
import torch

from accel_core import Accelerator
from accel_core.comm import collectives, control, objects, padding, transport
from accel_core.comm.packing import Layout
from accel_core.errors import (
    CheckpointError,
    CollectiveError,
    RankDisagreementError,
    RemoteRankError,
    UnsupportedTypeError,
)
from accel_core.plugins.handlers import InitProcessGroupKwargs
from accel_core.process import world as process_world
from accel_core.process.world import ensure
from accel_testing import world


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
    opened.exchange = lambda *given: (exchanged.append(opened._current.operation), real(*given))[1]
    for _ in range(3):
        assert collectives.reduce(torch.tensor([1.0 + here.rank])).tolist() == [1.5]
    assert exchanged == ["reduce(mean)"]
    collectives.reduce(torch.tensor([1.0, 2.0]))
    assert exchanged == ["reduce(mean)"] * 2
    with pytest.raises(RankDisagreementError):
        collectives.reduce(torch.ones(3 + here.rank))


@world(2)
def test_an_unchecked_reductions_failure_stays_on_its_rank(monkeypatch):
    """The others have gone on then: a frame would meet another collective."""
    here = ensure()
    through_device_memory(here)
    collectives.reduce(torch.ones(1))
    with monkeypatch.context() as patch:
        if here.rank:
            patch.setattr(Layout, "unpack", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError) if here.rank else contextlib.nullcontext():
            collectives.reduce(torch.ones(1))
    assert collectives.gather(torch.tensor([here.rank])).tolist() == [0, 1]


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


def begun():
    """Return how many collectives this rank began on the default group."""
    return torch.distributed.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


@pytest.mark.parametrize("device", ["host", "device"])
@world(3)
def test_many_ranks_agree_by_a_reduction(device):
    """What is alike on all ranks is one small collective; what differs arrives whole, and errors name what they do."""
    transport._FRAMES_UPTO = 1  # the process ends with the test
    here = ensure()
    opened = through_device_memory(here) if device == "device" else transport.open_transport(here)
    channel, before = control.Channel(here, "look"), begun()
    channel.wait()
    assert channel.exchange({"the same": 1}) == [{"the same": 1}] * 3
    assert channel.any(False) is False
    control.agree(None, "save")
    assert begun() == before + 4
    lists, tuples = channel.exchange(["alike"]), channel.exchange(("alike", None, 1))
    lists[0].append("of one rank")
    assert lists[1:] == [["alike"]] * 2
    assert tuples == [("alike", None, 1)] * 3
    assert opened._received.numel() < 100, "no frames of 4 KiB"
    assert channel.any(here.rank == 2) is True
    assert channel.broadcast("x" * 5_000 if here.rank == 1 else None, 1) == "x" * 5_000
    assert channel.exchange(here.rank) == [0, 1, 2]
    assert objects.gather_object([here.rank] * (here.rank + 1)) == [0, 1, 1, 2, 2, 2]
    assert objects.gather_object(["y" * 12_000_000 * here.rank])[2] == "y" * 24_000_000, "one rank after the other"
    assert collectives.gather({"a": torch.tensor([here.rank]), "b": torch.ones(2, 0)})["a"].tolist() == [0, 1, 2]
    assert collectives.reduce(torch.tensor([1.0 + here.rank])).tolist() == [2.0]
    assert collectives.broadcast(torch.tensor([here.rank]), 1).item() == 1
    padded = padding.pad_across_processes(torch.ones(1 + here.rank))
    assert padded.shape == (3,)
    with pytest.raises(RankDisagreementError, match=r"rank 0: gather at .*int64\[1\].*\n.*int64\[1\].*\n.*int64\[2\]"):
        collectives.gather(torch.ones(1 + here.rank // 2, dtype=torch.int64))
    with pytest.raises(RankDisagreementError, match="different operations"):
        collectives.gather(torch.ones(1)) if here.rank else channel.wait()
    failure = OSError("disk full, " + "again " * here.rank) if here.rank else None
    with pytest.raises(OSError if failure else RemoteRankError, match="disk full, again") as caught:
        control.agree(failure, "save")
    assert failure or "rank 2: OSError: disk full, again again" in str(caught.value)
    with pytest.raises(UnsupportedTypeError if here.rank == 1 else RemoteRankError, match="tensor"):
        collectives.gather("text" if here.rank == 1 else torch.ones(1))
    control.agree(None, "save")


@world(2)
def test_a_checkpoint_of_many_ranks(tmp_path):
    """A run that agrees by reductions saves, goes on as it was, and refuses a folder that one rank sees elsewhere."""
    transport._FRAMES_UPTO = 1  # the process ends with the test
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    kept = [weight.detach().clone() for weight in model.parameters()]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.load_state(tmp_path / "saved")
    assert all(map(torch.equal, kept, model.parameters()))
    with pytest.raises((RankDisagreementError, CheckpointError)):
        accelerator.load_state(tmp_path / ("saved" if accelerator.is_main_process else "other"))
    accelerator.wait_for_everyone()


@world(2)
def test_groups_on_the_host_wait_as_long_as_the_default_one():
    """Ranks wait in them for one that reads or saves for long, as the user lets them."""
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(hours=2))])
    opened = transport.open_transport(ensure(), "data")
    assert opened._group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2)
