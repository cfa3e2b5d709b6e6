"""Train a small transformer to fill in characters that were blotted out.

    accel launch --cpu --num-processes 2 examples/gallery/masked_language_model.py

Batches differ in how many characters are missing. `accelerator.backward(sum, weight=count)` gives the gradient of the
mean over all missing characters of all processes, not the mean of the batches' means. Which characters of a window are
missing depends on the window and the epoch alone, so any number of processes trains on the same ones.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, set_seed
from corpus import MASK, Transformer, prose, windows
from report import finish, folder

EPOCHS = 8


class Blotted(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text, and which characters of each are missing: about every seventh, others in every epoch.

    Args:
        text: Windows.
    """

    def __init__(self, text: Dataset[tuple[Tensor]]) -> None:
        self.text, self.epoch = text, 0

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index][0][1:]
        chance = torch.Generator().manual_seed(self.epoch * len(self) + index)
        return window, torch.rand(window.shape, generator=chance) < 0.15


def main() -> None:
    """Train, and measure how many missing characters are guessed after every epoch."""
    target = folder(__doc__, "masked_language_model")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    train, test = map(Blotted, windows(prose()))
    model = Transformer(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader, test_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    found = []
    for epoch in range(EPOCHS):
        train.epoch = epoch
        model.train()
        for window, missing in loader:
            with accelerator.accumulate(model):
                scores = model(window.masked_fill(missing, MASK))[missing]
                loss = nn.functional.cross_entropy(scores, window[missing], reduction="sum")
                accelerator.backward(loss, weight=missing.sum())
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = asked = 0
        for window, missing in test_loader:
            with torch.no_grad():
                hits = (model(window.masked_fill(missing, MASK)).argmax(2) == window) & missing
            hits, missing = accelerator.gather_for_metrics((hits.sum(1), missing.sum(1)))
            right, asked = right + int(hits.sum()), asked + int(missing.sum())
        found.append(right / asked)

    rows = {
        "processes": accelerator.num_processes,
        "missing characters": f"{asked:,} in text it has not seen",
        "guessed": f"{100 * found[-1]:.1f} %",
    }
    finish(accelerator, target, "Masked language model", rows, {"share guessed": found})


if __name__ == "__main__":
    main()
