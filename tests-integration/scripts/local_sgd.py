"""Local SGD: processes train alone for some steps, and then take the mean of their weights."""

import torch
from samples import classifier, digits, norm, report
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(5)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.1)
loader = DataLoader(digits(0, 512), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, apart = [], []
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
    for _ in range(2):
        for values, classes in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(values), classes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            own = torch.tensor([sum(value.double().norm() for value in model.parameters())])
            everybodys = accelerator.gather(own)
            apart.append((everybodys.max() - everybodys.min()).item())
report(accelerator, losses=losses, apart=apart, weights=norm(accelerator, model))
accelerator.end_training()
