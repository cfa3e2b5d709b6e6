"""One small training run, twice: through accel on this rank, and in plain PyTorch on the whole data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.plugins.accumulation import GradientAccumulationPlugin, ShortWindow
from accel_core.plugins.loading import DataLoaderConfiguration

FEATURES, CLASSES = 6, 3


def samples(count: int) -> TensorDataset:
    """Return `count` samples, the same wherever this is called."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)
    )


def model() -> nn.Module:
    """Return a model with the same weights wherever this is called."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose result shows a wrong size of any gradient."""
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)


def plain(count: int, window: int, epochs: int, *, short_window: str = "actual") -> dict[str, torch.Tensor]:
    """Train in one process, each step on one batch of `window` samples (the last of an epoch may be smaller).

    With `short_window="full"`, each step's loss is the sum over its samples divided by `window`.
    """
    net = model()
    optimizer = optimizer_of(net)
    x, y = samples(count).tensors
    for _ in range(epochs):
        for start in range(0, count, window):
            part = slice(start, start + window)
            share = len(x[part]) / window if short_window == "full" else 1.0
            (nn.functional.cross_entropy(net(x[part]), y[part]) * share).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


def with_accel(
    count: int,
    batch: int,
    accumulation: int,
    epochs: int,
    *,
    evaluate: bool = False,
    short_window: ShortWindow | None = None,
    **data: Any,
) -> dict[str, torch.Tensor]:
    """Train through accel on this rank, with micro-batches of `batch` samples a rank.

    With `evaluate`, an evaluation loop runs, and another is broken off, after every batch.
    """
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, short_window=short_window),
        dataloader_config=DataLoaderConfiguration(**data),
    )
    net = model()
    loader = DataLoader(samples(count), batch_size=batch)
    held_out = DataLoader(samples(5), batch_size=2)
    net, optimizer, loader, held_out = accelerator.prepare(net, optimizer_of(net), loader, held_out)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if evaluate:
                for _ in held_out:
                    pass
                half_read = iter(held_out)
                next(half_read)
    return {name: value.detach() for name, value in accelerator.get_state_dict(net).items()}


def with_weights(counts: list[list[int]], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Train one window on summed losses; `counts[rank][batch]` samples each, which may be none."""
    accelerator = Accelerator(gradient_accumulation_steps=len(counts[0]))
    net = model()
    net, optimizer = accelerator.prepare(net, optimizer_of(net))
    x, y = samples(sum(map(sum, counts))).tensors
    start = sum(map(sum, counts[:rank]))
    for count in counts[rank]:
        with accelerator.accumulate(net):
            part = slice(start, start + count)
            loss = nn.functional.cross_entropy(net(x[part]), y[part], reduction="sum")
            accelerator.backward(loss, weight=count)
            optimizer.step()
            optimizer.zero_grad()
        start += count
    return {name: value.detach() for name, value in accelerator.get_state_dict(net).items()}


def close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise unless two runs ended with the same weights, to float tolerance."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
