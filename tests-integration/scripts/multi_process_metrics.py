"""Metrics on many processes: what was read twice to fill the last batch counts once."""

import torch
from samples import CLASSES, begin, digits, report, train_on
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration


class Stream(IterableDataset):
    """The same samples without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[index] for index in range(len(self.data))])


def measure(accelerator, model, loader):
    """Return how many samples were asked, how many were right, the confusion matrix and the sum of losses."""
    model.eval()
    confusion, total, seen = torch.zeros(CLASSES, CLASSES, dtype=torch.long), 0.0, []
    for values, classes in loader:
        with torch.no_grad():
            scores = model(values)
        losses = cross_entropy(scores, classes, reduction="none")
        guesses, truths, losses = accelerator.gather_for_metrics((scores.argmax(1), classes, losses))
        confusion.index_put_((truths, guesses), torch.ones_like(truths), accumulate=True)
        total += losses.sum().item()
        seen.append(len(truths))
    return {"asked": sum(seen), "right": int(confusion.diag().sum()), "confusion": confusion.tolist(), "loss": total,
            "seen": seen}  # fmt: skip


found = {}
accelerator = Accelerator(cpu=True)
train, test = DataLoader(digits(0, 512), batch_size=16, shuffle=True), DataLoader(digits(512, 601), batch_size=8)
stream = DataLoader(Stream(digits(512, 601)), batch_size=8)
model, optimizer, train, test, stream = begin(accelerator, 11, AdamW, train, test, stream, lr=0.01)
for _ in range(2):
    model.train()
    for batch in train:
        train_on(accelerator, model, optimizer, batch)
found["map"] = measure(accelerator, model, test)
found["stream"] = measure(accelerator, model, stream)
names = [f"{index}" for index in range(accelerator.process_index, 5, accelerator.num_processes)]
found["objects"] = sorted(accelerator.gather_for_metrics(names, use_gather_object=True))

accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=True)
dispatched = accelerator.prepare(DataLoader(digits(512, 601), batch_size=8))
found["dispatched"] = measure(accelerator, model, dispatched)
report(accelerator, **found)
