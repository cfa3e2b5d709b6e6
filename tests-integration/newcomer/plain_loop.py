"""A plain loop, written from the documentation of the Accelerator alone."""

import torch
from sklearn.datasets import load_iris
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
features, labels = load_iris(return_X_y=True)
data = TensorDataset(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))
dataloader = DataLoader(data, batch_size=30, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.5)

accelerator = Accelerator()
model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)

for _ in range(60):
    for inputs, targets in dataloader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()

with torch.no_grad():
    right = total = 0
    for inputs, targets in dataloader:
        guesses, targets = accelerator.gather_for_metrics((model(inputs).argmax(dim=1), targets))
        right += int((guesses == targets).sum())
        total += len(targets)
accelerator.print(f"samples {total} accuracy {right / total:.3f}")
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
accelerator.print(f"model {type(unwrapped).__name__} on {accelerator.device} of {accelerator.num_processes}")
accelerator.end_training()
