"""Objects on real gloo ranks."""

import os
import resource

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_core.accelerator import Accelerator
from accel_core.comm import objects, transport
from accel_core.data.scatter import ScatterChannel
from accel_core.errors import (
    CollectiveError,
    RankDisagreementError,
    RemoteRankError,
    UnsupportedTypeError,
)
from accel_core.mesh.tensor import whole_on_first
from accel_core.process.world import ensure
from accel_testing import world


@world(2)
def test_gather_object_joins_lists_of_any_length():
    """Items come in the order of ranks, and lists may be empty."""
    rank = ensure().rank
    assert objects.gather_object([rank, {"k": (rank,)}] * rank) == [1, {"k": (1,)}]
    assert objects.gather_object((f"k{rank}",)) == ["k0", "k1"]


@pytest.mark.parametrize("value", [{"k": 1}, "ab", b"ab", 7])
@world(2)
def test_gathering_one_object_names_its_type(value: object):
    """One object is refused, with what to pass, instead of its keys, letters or numbers; nothing waits."""
    named = rf"got .* \({type(value).__name__}\)\. Pass \[value\]"
    for gather in (objects.gather_object, Accelerator().gather_for_metrics):
        with pytest.raises(UnsupportedTypeError, match=named):
            gather(value)
        with pytest.raises(RemoteRankError if ensure().rank else UnsupportedTypeError):
            gather([value] if ensure().rank else value)
        assert gather([value]) == [value, value]


@world(2)
def test_messages_need_no_memory_of_the_default_device():
    """Objects, and tensors that rank 0 hands out or collects, arrive whatever `torch.set_default_device` says."""
    rank, channel = ensure().rank, ScatterChannel(ensure())
    size = transport.largest_frame(2) * 3
    rows = [torch.arange(8.0), torch.arange(6000.0)]
    spread = distribute_tensor(rows[0], init_device_mesh("cpu", (2,)), [Shard(0)])
    with torch.device("meta"):
        assert objects.gather_object([b"x" * (size if rank else 5)]) == [b"xxxxx", b"x" * size]
        assert objects.gather_object([rank]) == [0, 1]
        got = channel.receive() if rank else channel.send(rows)
        collected = whole_on_first(spread)
    assert torch.equal(got, rows[1]) if rank else got is None
    assert torch.equal(collected, rows[0][4:] if rank else rows[0])


@world(2)
def test_unpicklable_objects():
    """The rank with an object that cannot be pickled says which; the other one hears of it."""
    rank = ensure().rank
    if rank:
        with pytest.raises(CollectiveError, match=r"picklable; got <class 'list'>.*Send its data instead"):
            objects.gather_object([lambda: None])
    else:
        with pytest.raises(RemoteRankError, match=r"rank 1 failed: CollectiveError"):
            objects.gather_object([1])
    assert objects.gather_object([rank]) == [0, 1]


@world(3)
def test_broadcast_object_list_in_place():
    """The list of the source replaces the items of the others in place."""
    rank = ensure().rank
    mine = [rank, {"k": rank}, "x" * (100_000 if rank == 2 else 1)]
    assert objects.broadcast_object_list(mine, from_process=2) is mine
    assert mine == [2, {"k": 2}, "x" * 100_000]


@world(3)
def test_memory_of_a_broadcast_object():
    """A long object costs each rank itself and one pickle of it, and not a pickle for each rank."""
    size = 64 * 2**20
    mine = [os.urandom(size) if ensure().rank == 1 else None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objects.broadcast_object_list(mine, from_process=1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert len(mine[0]) == size
    assert grown < 3 * size


@world(3)
def test_gather_object_with_one_long_list():
    """Lists too long to be padded to the longest arrive one by one; one that cannot be read there fails at the end."""
    rank = ensure().rank
    size = 12 * 2**20
    gathered = objects.gather_object([bytes([rank]) * (size if rank == 1 else rank)])
    assert gathered == [b"", b"\1" * size, b"\2\2"]
    with pytest.raises(ZeroDivisionError):
        objects.gather_object([b"x" * size, Unreadable() if rank == 0 else None])
    assert objects.gather_object([rank]) == [0, 1, 2]


class Unreadable:
    """Fails where its pickle is read."""

    def __reduce__(self):
        return divmod, (1, 0)


@world(2)
def test_broadcast_object_lists_of_different_lengths():
    """Lists of different lengths are refused on every rank, and stay as they were."""
    rank = ensure().rank
    mine = [0] * (rank + 1)
    with pytest.raises(RankDisagreementError, match=r"the value: 1 objects\n.*the value: 2 objects"):
        objects.broadcast_object_list(mine)
    assert mine == [0] * (rank + 1)
