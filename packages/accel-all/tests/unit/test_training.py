"""A loop that was written against `import accel` alone trains as plain PyTorch does."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel_testing import world

pytestmark = pytest.mark.usefixtures("fresh_state")


def problem() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Make a small regression: the same model, optimizer and data every time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 4, generator=generator)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(inputs, inputs.sum(1, keepdim=True))


def plain(batch_size: int) -> torch.Tensor:
    """Train without accel and return the weights."""
    model, optimizer, data = problem()
    for inputs, targets in DataLoader(data, batch_size=batch_size):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def with_accel(batch_size: int) -> torch.Tensor:
    """Train with accel and return the weights."""
    accelerator = accel.Accelerator(cpu=True)
    model, optimizer, data = problem()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.detach()


def test_one_process_trains_bit_by_bit_like_pytorch() -> None:
    """The weights after an epoch equal those of a plain loop."""
    assert torch.equal(with_accel(8), plain(8))


@pytest.mark.slow
@world(2)
def test_two_processes_train_like_one_with_twice_the_batch() -> None:
    """The weights after an epoch equal those of one process that takes both batches at once."""
    torch.testing.assert_close(with_accel(4), plain(8))
