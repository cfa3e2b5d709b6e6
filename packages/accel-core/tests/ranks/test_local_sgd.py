"""Local SGD on real gloo ranks."""

import copy

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.comm.objects import gather_object
from accel_core.errors import EngineUnavailableError
from accel_core.optim.local_sgd import LocalSGD
from accel_core.plugins.handlers import GradScalerKwargs
from accel_testing import world


def batches(rank, count=5):
    """Return the inputs that a rank trains on."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(4, 3, generator=generator) for _ in range(count)]


def train_alone(model, inputs):
    """Train with plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@world(2)
def test_weights_are_averaged_every_few_steps():
    """Five steps with averages after two, four and at the end equal two plain models averaged at those steps."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 1)
    replicas = [copy.deepcopy(plain) for _ in range(2)]
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        for rank, replica in enumerate(replicas):
            train_alone(replica, batches(rank)[start:stop])
        for weights in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([weight.detach() for weight in weights]).mean(0)
            for weight in weights:
                weight.data.copy_(mean)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for batch in batches(accelerator.process_index):
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            local_sgd.step()
    for trained, expected in zip(model.parameters(), replicas[0].parameters(), strict=True):
        torch.testing.assert_close(trained, expected)
    assert model.require_backward_grad_sync, "gradients are synchronized again after the block"
    weights = gather_object([[parameter.tolist() for parameter in model.parameters()]])
    assert weights[0] == weights[1]


@world(2)
def test_processes_scale_losses_alike_behind_the_block():
    """An overflow of one process in the block lets no scales differ behind it, where gradients are averaged scaled."""
    settings = GradScalerKwargs(init_scale=256.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[settings])
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(batch):
        optimizer.zero_grad()
        accelerator.backward(model(batch).mean())
        optimizer.step()

    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
        for number in range(2):
            step(torch.full((2, 3), float("inf") if number == accelerator.process_index == 1 else 1.0))
            local_sgd.step()
    step(torch.full((2, 3), 1.0 + accelerator.process_index))
    states = gather_object([(accelerator.scaler.state_dict(), [each.tolist() for each in model.parameters()])])
    assert states[0] == states[1]
    assert states[0][0]["scale"] == 128.0


@world(2)
def test_switched_off_or_impossible():
    """Switched off it changes nothing; a model that is not data parallel is refused."""
    accelerator = Accelerator(cpu=True)
    alone = torch.nn.Linear(1, 1)
    with LocalSGD(accelerator, alone, 8, enabled=False) as local_sgd:
        local_sgd.step()
    with pytest.raises(EngineUnavailableError, match=r"needs a whole model in each process; got Linear"):
        LocalSGD(accelerator, alone, 8)
