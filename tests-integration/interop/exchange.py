"""Train, save and go on, or load and go on, with either library: `exchange.py LIBRARY ACTION FOLDER`.

Data comes from the random number generators, so a resumed run is equal only if all of them were restored.
"""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import exchange_shards
import numpy as np
import torch
from torch import nn


class Count:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a count."""
        self.count = state["count"]


class Tied(nn.Module):
    """A model with a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the output of the second layer."""
        return self.second(self.norm(self.first(batch)))


def build(accelerator: Any, seed: int) -> tuple[Any, ...]:
    """Prepare two models, their optimizers and a schedule, and seed every generator differently on each rank."""
    torch.manual_seed(seed)
    models = Tied(), nn.Linear(3, 1)
    optimizers = (
        torch.optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    prepared = accelerator.prepare(*models, *optimizers, scheduler)
    count = Count()
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(seed + accelerator.process_index)
    random.seed(seed + accelerator.process_index)
    np.random.seed(seed + accelerator.process_index)
    return (*prepared, count)


def train(accelerator: Any, parts: tuple[Any, ...], steps: int) -> None:
    """Train on random data."""
    first, second, adamw, sgd, scheduler, count = parts
    for _ in range(steps):
        batch = torch.rand(4, 3) * (random.random() + float(np.random.random()))
        accelerator.backward(second(first(batch)).pow(2).mean())
        adamw.step()
        sgd.step()
        scheduler.step()
        adamw.zero_grad()
        sgd.zero_grad()
        count.count += 1


def final(accelerator: Any, parts: tuple[Any, ...], path: Path) -> None:
    """Write what the run ended with."""
    first, second, adamw, _, _, count = parts
    state = {f"first.{name}": value for name, value in accelerator.unwrap_model(first).state_dict().items()}
    state |= {f"second.{name}": value for name, value in accelerator.unwrap_model(second).state_dict().items()}
    state |= {"lr": torch.tensor(adamw.param_groups[0]["lr"]), "count": torch.tensor(count.count)}
    state |= {"next": torch.rand(1), "python": torch.tensor(random.random()), "numpy": torch.tensor(np.random.random())}
    torch.save(state, path)


def main() -> None:
    """Do one action with one library, with and without safetensors, and on several ranks with models in shards."""
    library, action, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    for safe in (True, False):
        accelerator._custom_objects.clear()
        accelerator.free_memory()
        folder = directory / f"safe-{safe}"
        parts = build(accelerator, 1 if action == "write" else 2)
        if action == "write":
            train(accelerator, parts, 3)
            accelerator.save_state(str(folder), safe_serialization=safe)
            accelerator.wait_for_everyone()
        else:
            accelerator.load_state(str(folder))
        train(accelerator, parts, 2)
        final(accelerator, parts, directory / f"{action}-{safe}-{accelerator.process_index}.pt")
    if accelerator.num_processes > 1:
        exchange_shards.exchange(accelerator, action, directory)
    accelerator.end_training()


if __name__ == "__main__":
    main()
