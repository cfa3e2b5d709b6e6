"""Train on a stream that has no length, stop in the middle, go on in the same place, and end with the same weights.

    accel launch --cpu --num-processes 2 examples/gallery/streaming.py

Shows an `IterableDataset`, which one process reads for all, and the data position that `save_state` keeps.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, set_seed
from corpus import LENGTH, Transformer, code, next_character_loss
from report import finish, folder

STEPS, SAVED_AT = 60, 35


class Stream(IterableDataset[Tensor]):
    """Windows of a text, read one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the windows."""
        text = code()
        for begin in range(0, len(text) - LENGTH, LENGTH):
            yield text[begin : begin + LENGTH + 1]


def run(folder: Path, resume: bool) -> tuple[Accelerator, dict[str, Tensor], list[float]]:
    """Train for `STEPS` steps, or for those after the saved state; return the weights and the loss of every step."""
    accelerator = Accelerator()
    set_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=8))
    if resume:
        accelerator.load_state(folder / "state")
    losses: list[float] = []
    first = SAVED_AT if resume else 0
    for step, window in enumerate(loader, first + 1):  # after `load_state`: what is left of the stream
        loss = next_character_loss(model, window)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if step == SAVED_AT and not resume:
            accelerator.save_state(folder / "state")
        if step == STEPS:
            break
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    accelerator.free_memory()
    return accelerator, weights, losses


def main() -> None:
    """Train straight through, then from the saved state, and compare."""
    target = folder(__doc__, "streaming")
    _, straight, losses = run(target, resume=False)
    accelerator, resumed, rest = run(target, resume=True)
    same = all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert same, "the resumed run ends with the weights of the uninterrupted one"
    rows = {
        "processes": accelerator.num_processes,
        "loss": f"{losses[0]:.2f} at first, {losses[-1]:.2f} after {STEPS} steps",
        "resumed": f"after step {SAVED_AT}, {len(rest)} steps more",
        "the same weights": f"{same}, bit for bit",
    }
    steps = range(1, STEPS + 1)
    finish(accelerator, target, "A stream, resumed", rows, {"x": steps, "loss": losses})


if __name__ == "__main__":
    main()
