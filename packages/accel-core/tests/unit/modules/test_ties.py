"""Tied tensors are found by identity."""

import pytest
import torch
from torch import nn

from accel_core.modules.ties import find_tied_parameters, tied_tensor_groups


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_within_and_across_subtrees_are_found(device: str) -> None:
    """A tied parameter and a shared module are each one group, on real and on empty tensors."""
    with torch.device(device):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    model["d"] = model["c"]
    assert find_tied_parameters(model) == [["a.weight", "b.weight"], ["c.weight", "d.weight"], ["c.bias", "d.bias"]]


def test_tied_buffers_are_found_on_request() -> None:
    """A buffer registered twice is a group only where buffers count; two parameters over one storage are none."""
    data = torch.zeros(2)
    assert find_tied_parameters(nn.ParameterDict({"a": nn.Parameter(data), "b": nn.Parameter(data)})) == []
    model = nn.ModuleDict({"a": nn.BatchNorm1d(2, affine=False), "b": nn.BatchNorm1d(2, affine=False)})
    model["b"].running_mean = model["a"].running_mean
    assert find_tied_parameters(model) == []
    assert tied_tensor_groups(model) == [["a.running_mean", "b.running_mean"]]
