"""Train on two processes, one of which meets a sample that it cannot read."""

import time

import torch
from torch.utils.data import DataLoader

from accel import Accelerator


class Samples(torch.utils.data.Dataset):
    """Sixteen samples, one of which is damaged."""

    def __len__(self):
        return 16

    def __getitem__(self, number):
        if number == 11:
            raise ValueError("sample 11 is damaged")
        return torch.rand(4)


accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), batch_size=2))
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    accelerator.print(f"step {step}")
    time.sleep(0.5)
