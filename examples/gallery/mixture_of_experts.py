"""Train a small mixture of experts on source code of Python's library; each process holds a part of the experts.

    accel launch --cpu --num-processes 2 examples/gallery/mixture_of_experts.py

Shows expert parallel for a model of one's own, and a balancing loss over the tokens of all processes. The text comes
with Python.
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel import Accelerator, ParallelismConfig, PartialState, set_seed
from corpus import Layer, Transformer, code, next_character_loss, test_loss, windows, write_on
from report import finish, folder

EPOCHS, WIDTH, EXPERTS, CHOICES = 2, 64, 8, 2


class Experts(nn.Module):
    """What processes share out: parameters of the shape (num_experts, ...), called with tokens, numbers and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        found = torch.zeros_like(tokens)
        for number in range(self.num_experts):  # those that this process holds
            row, choice = torch.where(numbers == number)
            made = nn.functional.gelu(tokens[row] @ self.up[number]) @ self.down[number]
            found = found.index_add(0, row, weights[row, choice, None] * made)
        return found


class Mixture(nn.Module):
    """Sends each token to two experts, and remembers how it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.chances = self.chosen = torch.zeros(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        """Map features of shape (batch, length, width) to the same shape."""
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        weights, numbers = chances.topk(CHOICES)
        self.chances = chances.mean(0)
        self.chosen = torch.bincount(numbers.flatten(), minlength=EXPERTS) / numbers.numel()
        return self.experts(tokens, numbers, weights).view_as(x)


class Block(Layer):
    """A layer of the gallery's transformer with a mixture in the place of its first linear layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.wide, self.narrow = Mixture(), nn.Linear(WIDTH, WIDTH)


def main() -> None:
    """Train on nine tenths of the text, test on the rest."""
    target = folder(__doc__, "mixture_of_experts")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(ep_size=PartialState().num_processes))
    set_seed(0)
    train, test = windows(code())
    model = Transformer(width=WIDTH)
    model.layers = nn.ModuleList(Block() for _ in model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(train, batch_size=16 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    test_loader = accelerator.prepare(DataLoader(test, batch_size=64))
    mixtures = [layer.wide for layer in model.layers]

    at, losses = [], []
    for epoch in range(EPOCHS):
        for number, (window,) in enumerate(loader):
            loss = next_character_loss(model, window)
            # How often all processes chose an expert, times how likely this one would: of a mean, the mean is exact.
            shares = accelerator.reduce([each.chosen for each in mixtures], "mean")
            balance = sum(EXPERTS * (share * each.chances).sum() for share, each in zip(shares, mixtures, strict=True))
            accelerator.backward(loss + 0.01 * balance)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                at.append(epoch * len(loader) + number + 1)
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))

    tested = test_loss(accelerator, model, test_loader)
    accelerator.save_model(model, target)
    held = sum(len(getattr(each.experts.up, "to_local", lambda own=each.experts.up: own)()) for each in mixtures)
    busiest = max(float(share.max()) for share in shares)
    rows = {
        "processes": accelerator.num_processes,
        "experts": f"{EXPERTS * len(mixtures)}, of which each process holds {held}",
        "the busiest gets": f"{busiest:.0%} of the tokens of its layer",
        "bits per character": f"{tested / math.log(2):.2f} on code it has not seen",
        "it writes": write_on(accelerator.unwrap_model(model), "def ", 50).replace("\n", " "),
    }
    finish(accelerator, target, "Mixture of experts", rows, {"x": at, "training loss": losses})


if __name__ == "__main__":
    main()
