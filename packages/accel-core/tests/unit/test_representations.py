"""Objects show themselves: what they are made of, in one line."""

import inspect

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator


@pytest.mark.usefixtures("fresh_state")
def test_prepared_objects_name_what_they_hold() -> None:
    """Loaders name their data, batches, ranks and device; schedules their own class and the present rate."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert repr(loader) == "DataLoaderShard(TensorDataset, batches of 4, device=cpu)"
    assert repr(schedule) == "AcceleratedScheduler(StepLR, lr=[0.1], steps when its optimizers step)"
    assert "AcceleratedOptimizer(SGD" in repr(optimizer)
    stream = accelerator.prepare(DataLoader(Stream(0), batch_size=None))
    assert repr(stream).startswith("DataLoader")


def test_the_signature_of_an_accelerator_is_readable() -> None:
    """A default that stands for nothing given has a name, and no address."""
    shown = str(inspect.signature(Accelerator))
    assert "= UNSET" in shown
    assert "object at" not in shown
