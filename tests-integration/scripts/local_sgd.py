"""Local SGD: processes train alone for some steps, and then take the mean of their weights."""

import torch
from samples import begin, digits, norm, report, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = begin(accelerator, 5, SGD, DataLoader(digits(0, 512), batch_size=8, shuffle=True), lr=0.1)
losses, apart = [], []
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = train_on(accelerator, model, optimizer, batch)
                local.step()
            losses.append(accelerator.gather(loss.reshape(1)).mean().item())
            own = torch.tensor([sum(value.double().norm() for value in model.parameters())])
            everybodys = accelerator.gather(own)
            apart.append((everybodys.max() - everybodys.min()).item())
report(accelerator, losses=losses, apart=apart, weights=norm(accelerator, model))
