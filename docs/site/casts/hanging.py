"""Train on two processes, one of which waits for a file that nobody writes."""

import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel import Accelerator


def wait_for_labels():
    """Wait for a file."""
    while not Path("labels.done").exists():
        time.sleep(0.1)


accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.rand(32, 4), batch_size=2))
for step, batch in enumerate(loader):
    if step == 3 and accelerator.process_index == 1:
        wait_for_labels()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    accelerator.print(f"step {step}")
    time.sleep(0.3)
