"""Accumulation for a language model: every token of a window counts the same, however long the sequences are."""

import torch
from samples import norm, report, text
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

ACCUMULATION, LONGEST, IGNORED = 4, 24, -100


class Speaker(nn.Module):
    """Foretells the next character from the characters before it."""

    def __init__(self):
        super().__init__()
        self.table, self.memory = nn.Embedding(64, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        """Return a score for each character at each place."""
        return self.head(self.memory(self.table(tokens))[0])


def sequences(count):
    """Cut the text into sequences of differing length; behind the end of one, targets are left out."""
    letters, found, at = text(), [], 0
    for index in range(count):
        length = 6 + (index * 7) % (LONGEST - 5)
        tokens, targets = torch.zeros(LONGEST, dtype=torch.long), torch.full((LONGEST,), IGNORED)
        tokens[:length], targets[:length] = letters[at : at + length], letters[at + 1 : at + length + 1]
        found.append({"tokens": tokens, "targets": targets})
        at += length
    return found


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
set_seed(6)
model = Speaker()
optimizer = SGD(model.parameters(), lr=0.5)
loader = DataLoader(sequences(264), batch_size=4)  # the last window of an epoch is short on one process and on two
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, counts, steps = [], [], 0
for _ in range(2):
    reader = iter(loader)
    left = len(loader)
    while left > 0:
        window = [next(reader) for _ in range(min(ACCUMULATION, left))]
        left -= len(window)
        asked = sum((batch["targets"] != IGNORED).sum() for batch in window)
        asked = accelerator.gather(asked.reshape(1)).sum().item()
        total = 0.0
        for index, batch in enumerate(window):
            last = index == len(window) - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with accelerator.no_sync(model) if not last else torch.enable_grad():
                scores = model(batch["tokens"])
                loss = cross_entropy(
                    scores.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=IGNORED
                )
                # What `backward` divides by and what the processes take the mean of is undone here.
                loss = loss * ACCUMULATION * accelerator.num_processes / asked
                accelerator.backward(loss)
            total += loss.detach().reshape(1) / ACCUMULATION
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        losses.append(accelerator.gather(total).mean().item())
        counts.append(asked)
report(accelerator, steps=steps, counts=counts, losses=losses, weights=norm(accelerator, model))
