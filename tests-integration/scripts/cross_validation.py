"""Cross-validation: a model for each fold, and the mean of their answers on samples that none has seen."""

import torch
from samples import begin, digits, norm, report, train_on
from torch.optim import AdamW
from torch.utils.data import ConcatDataset, DataLoader, Subset

from accelerate import Accelerator

FOLDS = 3

accelerator = Accelerator(cpu=True)
data, held_out = digits(0, 450), digits(450, 533)
parts = [Subset(data, range(fold, len(data), FOLDS)) for fold in range(FOLDS)]


def scores(model, loader):
    """Return the model's scores and the true classes, each sample once, on every process."""
    model.eval()
    found = []
    with torch.no_grad():
        for values, classes in loader:
            found.append(accelerator.gather_for_metrics((model(values), classes)))
    return torch.cat([score for score, _ in found]), torch.cat([truth for _, truth in found])


validated, answers, weights = [], [], []
for fold in range(FOLDS):
    rest = ConcatDataset([part for index, part in enumerate(parts) if index != fold])
    loaders = [
        DataLoader(rest, batch_size=16, shuffle=True),
        DataLoader(parts[fold], batch_size=16),
        DataLoader(held_out, batch_size=16),
    ]
    model, optimizer, train, validation, test = begin(accelerator, 3, AdamW, *loaders, lr=0.01)
    for _ in range(2):
        model.train()
        for batch in train:
            train_on(accelerator, model, optimizer, batch)
    guesses, truths = scores(model, validation)
    validated.append([len(truths), int((guesses.argmax(1) == truths).sum())])
    score, truth = scores(model, test)
    answers.append(score.softmax(1))
    weights.append(norm(accelerator, model))
    model, optimizer, train, validation, test = accelerator.free_memory(model, optimizer, train, validation, test)

mean = torch.stack(answers).mean(0)
right = int((mean.argmax(1) == truth).sum())
report(accelerator, validated=validated, tested=len(truth), right=right, certainty=mean.max(1).values.sum().item(),
       weights=weights)  # fmt: skip
