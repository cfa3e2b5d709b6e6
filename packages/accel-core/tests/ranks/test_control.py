"""The control channel on real gloo ranks."""

import threading

import pytest
import torch

from accel_core.comm import collectives, transport
from accel_core.comm.control import Channel, in_step, wait_for_all
from accel_core.errors import (
    CheckpointError,
    CollectiveError,
    ConfigurationError,
    PartView,
    RankDisagreementError,
    RemoteRankError,
)
from accel_core.process import world as process_world
from accel_core.process.world import ensure
from accel_testing import world


@world(3)
def test_values_of_all_ranks():
    """Every rank gets every rank's object, bytes and flag, and the object of one rank."""
    here = ensure()
    channel = Channel(here, "a test")
    assert channel.exchange({"rank": here.rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert channel.exchange_bytes(b"x" * here.rank * 50_000) == [b"x" * length * 50_000 for length in range(3)]
    assert channel.broadcast(here.rank * "x", 2) == "xx"
    assert channel.any(here.rank == 1)
    assert not channel.any(False)
    channel.wait()


@world(3)
def test_values_of_some_ranks():
    """Members trade objects of any length without NumPy, and the rank that is none of them need not come."""
    here = ensure()
    channel = Channel(here, "a test")
    torch.Tensor.numpy = None  # type: ignore[assignment, method-assign]  # accel-core does not need NumPy
    if here.rank != 1:
        told = channel.exchange_among(torch.full((here.rank * 40_000 + 1,), here.rank), (0, 2))
        assert [(len(part), int(part[0])) for part in told] == [(1, 0), (80_001, 2)]
    assert channel.exchange_among(here.rank, (1 if here.rank == 0 else 0,)) == [here.rank]
    assert channel.exchange(here.rank) == [0, 1, 2]


@world(3)
def test_a_value_of_some_ranks_that_cannot_be_pickled():
    """The member whose value it is says so, the other members name it, and then they trade again."""
    here = ensure()
    channel = Channel(here, "a test")
    for _ in range(2):
        with pytest.raises(RemoteRankError if here.rank != 1 else CollectiveError, match=r"pickl") as caught:
            channel.exchange_among([lambda: None] if here.rank == 1 else [here.rank], (0, 1, 2))
        assert (here.rank == 1) != ("rank 1 failed" in str(caught.value))
    assert channel.exchange_among(here.rank, (0, 1, 2)) == [0, 1, 2]


@world(2)
def test_a_source_that_is_no_rank_or_differs():
    """A broadcast from nobody is refused, and so is one whose source differs; every rank is told."""
    here = ensure()
    channel = Channel(here, "a test")
    with pytest.raises(ConfigurationError, match=r"must be a rank; got 5 with 2 ranks"):
        channel.broadcast(1, 5)
    with pytest.raises(RankDisagreementError, match=r"source: rank 0\n.*source: rank 1"):
        channel.broadcast(1, here.rank)
    with pytest.raises(RemoteRankError if here.rank else CollectiveError, match=r"picklable"):
        channel.broadcast(lambda: None, 0)
    assert channel.broadcast(here.rank, 1) == 1


@world(3)
def test_a_block_that_fails_on_one_rank():
    """The rank keeps its own error, the others get one that names it, and then all go on."""
    here = ensure()
    channel = Channel(here, "save_state")
    entered = []

    def work():
        with channel.together("writing the weights"):
            entered.append(here.rank)
            if here.rank == 1:
                raise CheckpointError("the disk is full")

    kind = CheckpointError if here.rank == 1 else RemoteRankError
    with pytest.raises(kind, match=r"the disk is full") as caught:
        work()
    assert entered == [here.rank]
    if here.rank != 1:
        assert str(caught.value).startswith("writing the weights stopped on rank")
    with channel.together("reading"):
        pass
    assert channel.exchange(here.rank) == [0, 1, 2]


@world(4)
def test_ranks_that_fail_alike_are_reported_once():
    """What several ranks report in the same words stands once, with the ranks; other words stand beside it."""
    here = ensure()
    channel = Channel(here, "a test")
    for texts, reported in (
        (
            [None, "the disk is full.", "the disk is full.", "the disk is full"],
            "ranks 1, 2, 3 failed: OSError: the disk is full. Fix",
        ),
        (
            [None, "the disk is full", "no such folder", "the disk is full"],
            "failed: ranks 1, 3: OSError: the disk is full; rank 2: OSError: no such folder. Fix",
        ),
    ):
        text = texts[here.rank]
        with pytest.raises(RemoteRankError if text is None else OSError) as caught:
            channel.agree(None if text is None else OSError(text))
        assert (reported if text is None else text) in str(caught.value)


@world(2)
def test_an_operation_that_fails_inside_a_block():
    """A failure that the other ranks learned of inside the block is not told again at its end."""
    here = ensure()
    channel = Channel(here, "a test")
    for nest in ("text", torch.ones(1 + here.rank)):
        wrong = torch.ones(1) if nest == "text" and here.rank else nest
        with pytest.raises((RemoteRankError, RankDisagreementError, TypeError)), channel.together("gathering"):
            collectives.gather(wrong)
        assert channel.exchange(here.rank) == [0, 1]


@world(2)
def test_others_collectives_begin_together():
    """A block of foreign collectives is entered by all ranks with the same parts, or by none."""
    here = ensure()
    with in_step(here, "foreign", {"weight": PartView("float32", (2,))}):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
    assert total.item() == 2
    entered = []
    with (
        pytest.raises(RankDisagreementError, match=r"weight: float32\[1\]\n.*weight: float32\[2\]"),
        in_step(here, "foreign", {"weight": PartView("float32", (1 + here.rank,))}),
    ):
        entered.append(1)
    assert not entered


@world(2)
def test_a_group_beside_training():
    """A thread talks in a group of its own while the main thread gathers; it is made once for a process group."""
    here = ensure()
    aside = Channel(here, "beside", group_name="another")
    made = transport.open_transport(here, "another")
    told = []

    def talk():
        told.extend(aside.exchange((here.rank, number)) for number in range(50))

    thread = threading.Thread(target=talk)
    thread.start()
    for number in range(50):
        assert collectives.gather(torch.tensor([here.rank + number])).tolist() == [number, number + 1]
    thread.join()
    assert told == [[(0, number), (1, number)] for number in range(50)]
    process_world.forget()
    Channel(ensure(), "beside", group_name="another").wait()
    assert transport.open_transport(ensure(), "another") is made


@world(2)
def test_a_group_that_one_rank_alone_opens():
    """It is named where another gathers, and making a group would wait for ever; channels of two uses do not mix."""
    here = ensure()
    with pytest.raises(RankDisagreementError, match=r"rank 0: gather at .*\n.*rank 1: opening the group 'another' at"):
        Channel(here, "beside", group_name="another") if here.rank else collectives.gather(torch.ones(1))
    with pytest.raises(RankDisagreementError, match=r"rank 0: load at .*\n.*rank 1: save at"):
        Channel(here, "save" if here.rank else "load").exchange(1)


@world(2)
def test_groups_of_threads_after_another_group():
    """The groups for threads of a process group that was left are not used again."""
    here = ensure()
    Channel(here, "beside", group_name="another").wait()
    left = transport.open_transport(here, "another")
    folder = process_world.environ.text("ACCELERATE_DEBUG_RDV_FILE")
    process_world.destroy()
    process_world.environ.write("ACCELERATE_DEBUG_RDV_FILE", f"{folder}-again")
    again = ensure()
    Channel(again, "beside", group_name="another").wait()
    assert transport.open_transport(again, "another") is not left


def test_one_process(fresh_state):
    """With one process every method gives back what it got."""
    here = ensure(cpu=True)
    channel = Channel(here, "a test", group_name="another")
    assert channel.exchange(1) == [1]
    assert channel.exchange_bytes(b"x") == [b"x"]
    assert channel.exchange_among(1, (0,)) == [1]
    assert channel.broadcast("x") == "x"
    assert channel.any(True)
    channel.wait()
    wait_for_all(here)
    with pytest.raises(OSError, match="full"), channel.together("writing"):
        raise OSError("full")
