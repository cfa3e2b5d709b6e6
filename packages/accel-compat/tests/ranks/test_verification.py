"""Decorators for operations, on real gloo ranks."""

import pytest
import torch

from accel_core.comm import collectives
from accel_core.process.world import ensure
from accel_testing import limits, world
from accelerate import _verification

DEBUG = {"ACCELERATE_DEBUG_MODE": "1", "ACCELERATE_DEBUG_TIMEOUT": f"{limits.limit():.0f}"}


@world(2, environment=DEBUG)
def test_verify_operation_checks_shapes():
    """A decorated function is not entered when shapes differ."""
    rank = ensure().rank
    entered = []

    @_verification.verify_operation
    def all_to_all(tensor):
        entered.append(tensor)

    with pytest.raises(_verification.DistributedOperationException, match=r"all_to_all"):
        all_to_all(torch.ones(1 + rank))
    assert not entered
    all_to_all(tensor=torch.ones(3))
    assert len(entered) == 1


@world(2)
def test_chained_operation_names_the_function():
    """A disagreement inside a decorated function names that function."""
    rank = ensure().rank

    @_verification.chained_operation
    def mean_of(tensor):
        return collectives.reduce(tensor)

    with pytest.raises(_verification.DistributedOperationException, match=r"mean_of was called with data that differs"):
        mean_of(torch.ones(1 + rank))
