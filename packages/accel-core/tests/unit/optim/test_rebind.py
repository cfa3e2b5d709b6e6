"""Optimizers that follow replaced parameters."""

import gc

import pytest
import torch
from torch import nn

from accel_core.errors import PreparationError
from accel_core.optim.rebind import ParameterNames


def _replace(model: nn.Module, name: str, value: torch.Tensor) -> nn.Parameter:
    new = nn.Parameter(value)
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, new)
    return new


def _trained() -> tuple[nn.Sequential, torch.optim.Adam]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.1 + i} for i, p in enumerate(model.parameters())])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_of_wrappers_do_not_count() -> None:
    """A part that was wrapped since (for activation checkpointing, say) keeps its parameters' names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = _trained()
    names = ParameterNames()
    names.remember(model)
    inner = model[0]
    model[0] = checkpoint_wrapper(inner)
    new = nn.Parameter(inner.weight.detach().clone())
    inner.weight = new
    names.rebind(optimizer)
    assert optimizer.param_groups[0]["params"] == [new]


@pytest.mark.parametrize("how", ["gone", "another shape"])
def test_lost_parameters_are_refused_group_by_group(how: str) -> None:
    """The error names every group left over, and nothing was changed."""
    model, optimizer = _trained()
    names = ParameterNames()
    names.remember(model)
    held = [group["params"][0] for group in optimizer.param_groups]
    if how == "gone":
        model[1] = nn.Identity()
    else:
        model[1] = nn.Linear(4, 2)
    _replace(model, "0.bias", torch.zeros(3))
    for act in (names.check, names.rebind):
        with pytest.raises(PreparationError, match=r"Adam.*group 2: 1.weight, group 3: 1.bias; stepping"):
            act(optimizer)
    assert all(group["params"][0] is before for group, before in zip(optimizer.param_groups, held, strict=True))


@pytest.mark.slow
def test_parameters_of_nobody_are_left_alone() -> None:
    """What belongs to no model that was seen, or to one that is gone, is not touched."""
    names = ParameterNames()
    model, optimizer = _trained()
    held = [group["params"][0] for group in optimizer.param_groups]
    names.rebind(optimizer)
    names.remember(model)
    del model
    gc.collect()
    names.rebind(optimizer)
    assert all(group["params"][0] is before for group, before in zip(optimizer.param_groups, held, strict=True))
