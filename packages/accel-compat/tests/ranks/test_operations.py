"""A tensor that some ranks hold reaches all."""

import pytest
import torch

from accel_core.errors import CollectiveError, RankDisagreementError
from accel_core.process.world import ensure
from accel_testing import world
from accelerate._operations import copy_tensor_to_devices


@world(2)
def test_copy_to_all_ranks() -> None:
    """A tensor that one rank holds reaches all; where all hold one, they get the sum."""
    rank = ensure().rank
    only = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16) if rank else None
    copied = copy_tensor_to_devices(only)
    assert copied.dtype == torch.bfloat16
    assert copied.tolist() == [[1.0, 2.0]]
    assert copy_tensor_to_devices(torch.tensor([rank, 1])).tolist() == [1, 2]
    with pytest.raises(CollectiveError, match=r"No rank holds a tensor"):
        copy_tensor_to_devices(None)


@world(2)
def test_tensors_of_other_shapes_are_not_summed() -> None:
    """Ranks that hold tensors of different shapes are told, all of them."""
    with pytest.raises(RankDisagreementError):
        copy_tensor_to_devices(torch.ones(1 + ensure().rank))
