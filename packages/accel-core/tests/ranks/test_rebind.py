"""Optimizers and weighted windows of parameters that are sharded in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accel_core.accelerator import Accelerator
from accel_core.options.enums import DistributedType
from accel_core.strategies import registry
from accel_core.strategies.strategy import Strategy
from accel_testing import requires, world


class ShardedInPlace(Strategy):
    """Shards linear layers by torch's `fully_shard`, which replaces their parameters, and nothing else."""

    name = "in-place"

    def label(self) -> DistributedType:
        """Return the label of data parallel, for want of another."""
        return self.world.hardware.label

    def distribute(self, model: nn.Module) -> nn.Module:
        """Shard the inner linear layers; average the gradients of the others by hooks."""
        inner = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features > 1]
        for part in inner:
            fully_shard(part)
        sharded = {id(parameter) for part in inner for parameter in part.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in sharded:
                parameter.register_post_accumulate_grad_hook(_average)
        return model


def _average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    torch.distributed.all_reduce(parameter.grad)
    parameter.grad /= torch.distributed.get_world_size()


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())])


@requires("torch:2.8")  # the first that computes in shards on a CPU
@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
@world(2, environment={"ACCELERATE_STRATEGY": "in-place"})
def test_adam_goes_on_after_its_model_was_sharded(order: str) -> None:
    """Groups and moments of an optimizer that has stepped follow into the shards: training equals one process."""
    registry.register_strategy(ShardedInPlace)
    data = torch.arange(24.0, dtype=torch.double).reshape(2, 4, 3) / 24
    expected, model = _model(), _model()
    plain, optimizer = _adam(expected), _adam(model)
    for net, own in ((expected, plain), (model, optimizer)):
        net(data[0]).square().mean().backward()
        own.step()
        own.zero_grad()
    accelerator = Accelerator()
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], DTensor)
    for _ in range(2):
        expected(data[1]).square().mean().backward()
        plain.step()
        plain.zero_grad()
        accelerator.backward(model(data[1, accelerator.process_index :: 2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    own = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}
    torch.testing.assert_close(own, dict(expected.state_dict()))


@requires("torch:2.8")  # the first that computes in shards on a CPU
@world(2, environment={"ACCELERATE_STRATEGY": "in-place"})
def test_weights_scale_sharded_and_plain_gradients() -> None:
    """A weighted window of a model that is sharded in part is that of one process."""
    registry.register_strategy(ShardedInPlace)
    data = torch.arange(15.0, dtype=torch.double).reshape(5, 3) / 15
    expected = _model()
    expected(data).square().mean().backward()
    accelerator = Accelerator()
    model = accelerator.prepare(_model())
    part = data[:2] if accelerator.is_main_process else data[2:]
    accelerator.backward(model(part).square().sum(), weight=len(part))
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        gradient = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(gradient, other.grad)
