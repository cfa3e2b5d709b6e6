"""Modules that take a place in a model that one process prepared."""

import gc
import logging

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.modules import joined


def test_an_optimizer_that_steps_only_what_was_replaced_is_named(caplog):
    """One process averages nothing, so it is warned, once; what the new module's own optimizer steps is right."""
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net[1] = nn.Linear(2, 1)
    before = net[1].weight.clone()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            accelerator.backward(net(torch.ones(1, 2)).sum())
            optimizer.step()
    assert caplog.text.count("does not step") == 1
    assert "got gradients of 1.weight, 1.bias" in caplog.text
    assert torch.equal(net[1].weight, before)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer.step()
    assert not torch.equal(net[1].weight, before)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_noted_goes_with_the_model_and_with_preparing_it_again(again):
    """Nothing is kept of models that are gone, and nothing is said of those that were prepared with what joined."""
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    net.append(nn.ReLU())
    assert not joined.noted
    net[0] = nn.Linear(2, 2)
    assert len(joined.noted) == 1
    if again:
        accelerator.prepare(net)
    else:
        accelerator.free_memory()
        del net
        gc.collect()
        accelerator.prepare(nn.Linear(1, 1))
    assert not joined.noted
