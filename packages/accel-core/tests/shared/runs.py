"""A small real run to save and restore, and what it holds."""

from typing import Any

import torch
from torch import nn

from accel_core.checkpoint.run import BareRun


class Counter:
    """Something registered for checkpointing."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the count back."""
        self.count = state["count"]


def build(seed: int = 0, steps: int = 3) -> BareRun:
    """Return a run with a model of two layers that share a weight, after some steps of training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(8, 4)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run = BareRun([model], [optimizer], [scheduler], custom_objects=[Counter(seed)], step=seed)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 1))
    return run


def everything(run: BareRun) -> dict[str, Any]:
    """Return copies of everything that a checkpoint of the run holds."""
    tensors: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}/{key}")
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                walk(inner, f"{path}/{number}")
        else:
            tensors[path] = value.clone() if isinstance(value, torch.Tensor) else value

    assert run.scaler is not None
    walk(dict(run.models[0].state_dict()), "model")
    walk(run.optimizers[0].state_dict(), "optimizer")
    walk(run.schedulers[0].state_dict(), "scheduler")
    walk(run.scaler.state_dict(), "scaler")
    walk(run.custom_objects[0].state_dict(), "custom")
    walk(torch.get_rng_state(), "rng")
    walk(run.step, "step")
    return tensors


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the names of what differs, bit for bit."""
    found = sorted(first.keys() ^ second.keys())
    for name in sorted(first.keys() & second.keys()):
        one, other = first[name], second[name]
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        if not same:
            found.append(name)
    return found
