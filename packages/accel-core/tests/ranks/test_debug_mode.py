"""ACCELERATE_DEBUG_MODE: ranks that are in different places are told so instead of hanging."""

import os
import time

import pytest
import torch

from accel_core.comm import collectives
from accel_core.errors import RankDisagreementError
from accel_core.process.world import ensure
from accel_core.state.process import wait_for_everyone
from accel_testing import limits, world

DEBUG = {"ACCELERATE_DEBUG_MODE": "1", "ACCELERATE_DEBUG_TIMEOUT": f"{limits.limit():.0f}"}
IMPATIENT = {"ACCELERATE_DEBUG_MODE": "1", "ACCELERATE_DEBUG_TIMEOUT": f"{2 * limits.slowness():.0f}"}


def outlast() -> None:
    """Stay away for longer than others wait."""
    time.sleep(2 * float(os.environ["ACCELERATE_DEBUG_TIMEOUT"]))


@world(3, environment=DEBUG)
def test_a_rank_that_skips_an_operation():
    """A rank that leaves out a gather and goes to the next operation: all ranks raise at once and say who is where."""
    rank = ensure().rank
    deadline = limits.Deadline()
    operation = collectives.reduce if rank == 1 else collectives.gather
    with pytest.raises(RankDisagreementError) as caught:
        operation(torch.ones(2))
    assert not deadline.is_over
    message = str(caught.value)
    assert "rank 0: gather at" in message
    assert "rank 1: reduce(mean) at" in message
    assert "rank 2: gather at" in message
    assert "test_debug_mode.py:" in message


@world(2, environment=IMPATIENT)
def test_a_rank_that_never_comes():
    """A rank that does something else meanwhile is named with where it was last seen; nobody waits for ever."""
    rank = ensure().rank
    collectives.gather(torch.ones(1))
    if rank == 1:
        outlast()
        return
    deadline = limits.Deadline()
    with pytest.raises(
        RankDisagreementError, match=r"rank 1 did not come within .*; rank 1 was last seen in gather at .*DEBUG_TIMEOUT"
    ):
        collectives.gather(torch.ones(1))
    assert not deadline.is_over


@world(2, environment=IMPATIENT)
def test_a_rank_that_comes_too_late():
    """A rank that arrives after the others gave up raises too, instead of waiting alone."""
    rank = ensure().rank
    collectives.gather(torch.ones(1))  # ranks may start seconds apart
    if rank == 1:
        outlast()
    with pytest.raises(RankDisagreementError, match=r"did not come"):
        collectives.gather(torch.ones(1))


@world(2, environment=DEBUG)
def test_ranks_that_agree_are_left_alone_and_others_are_told_apart():
    """Operations give their results; different shapes, and a barrier beside a gather, name each rank's line."""
    rank = ensure().rank
    for _ in range(5):
        assert collectives.gather(torch.tensor([rank])).tolist() == [0, 1]
        assert collectives.reduce(torch.tensor([rank]), "sum").tolist() == [1]
    with pytest.raises(RankDisagreementError, match=r"(?s)rank 0: gather at .*py:\d+ in .*float32\[1\].*float32\[2\]"):
        collectives.gather(torch.ones(1 + rank))
    with pytest.raises(RankDisagreementError, match=r"(?s)rank 0: gather at.*rank 1: wait_for_everyone at"):
        wait_for_everyone() if rank else collectives.gather(torch.ones(1))
