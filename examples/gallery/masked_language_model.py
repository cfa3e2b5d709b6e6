"""Train a small transformer to fill in characters that were blotted out.

    accel launch --cpu --num-processes 2 examples/gallery/masked_language_model.py

Batches differ in how many characters are missing. `accelerator.backward(sum, weight=count)` gives the gradient of the
mean over all missing characters of all processes, not the mean of the batches' means.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed
from corpus import MASK, Transformer, prose, windows
from report import finish, folder

EPOCHS = 8


def blot_out(window: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a window with about every seventh character missing, and which ones these are."""
    missing = (torch.rand(window.shape, generator=generator) < 0.15).to(window.device)
    return window.masked_fill(missing, MASK), missing


def main() -> None:
    """Train, and measure how many missing characters are guessed after every epoch."""
    target = folder(__doc__, "masked_language_model")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    train, test = windows(prose())
    model = Transformer(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader, test_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    generator = torch.Generator().manual_seed(accelerator.process_index)  # each process blots out other places
    found = []
    for _ in range(EPOCHS):
        model.train()
        for (window,) in loader:
            window = window[:, 1:]
            with accelerator.accumulate(model):
                blotted, missing = blot_out(window, generator)
                scores = model(blotted)[missing]
                loss = nn.functional.cross_entropy(scores, window[missing], reduction="sum")
                accelerator.backward(loss, weight=missing.sum())
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        fixed = torch.Generator().manual_seed(1)
        right = asked = 0
        for (window,) in test_loader:
            window = window[:, 1:]
            blotted, missing = blot_out(window, fixed)
            with torch.no_grad():
                hits = (model(blotted).argmax(2) == window) & missing
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
