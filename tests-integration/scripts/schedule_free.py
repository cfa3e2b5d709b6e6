"""A schedule-free optimizer: it has to know whether the model trains or is asked."""

import schedulefree
import torch
from samples import begin, digits, norm, report, train_on
from torch.utils.data import DataLoader

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
train, test = DataLoader(digits(0, 512), batch_size=16, shuffle=True), DataLoader(digits(512, 611), batch_size=16)
model, optimizer, train, test = begin(
    accelerator, 8, schedulefree.AdamWScheduleFree, train, test, lr=0.02, warmup_steps=10
)
losses, right, weights = [], [], []
for _ in range(3):
    model.train()
    optimizer.train()
    for batch in train:
        loss = train_on(accelerator, model, optimizer, batch)
        losses.append(accelerator.reduce(loss, "mean").item())
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
