"""A schedule-free optimizer: it has to know whether the model trains or is asked."""

import schedulefree
import torch
from samples import classifier, digits, norm, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(8)
model = classifier()
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=10)
train, test = DataLoader(digits(0, 512), batch_size=16, shuffle=True), DataLoader(digits(512, 611), batch_size=16)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
losses, right, weights = [], [], []
for _ in range(3):
    model.train()
    optimizer.train()
    for values, classes in train:
        loss = cross_entropy(model(values), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    model.eval()
    optimizer.eval()
    hits = asked = 0
    for values, classes in test:
        with torch.no_grad():
            guesses, truths = accelerator.gather_for_metrics((model(values).argmax(1), classes))
        hits, asked = hits + int((guesses == truths).sum()), asked + len(truths)
    right.append([asked, hits])
    weights.append(norm(accelerator, model))
report(accelerator, losses=losses, right=right, weights=weights)
accelerator.end_training()
