"""Training on a GPU is plain PyTorch's bit for bit, and nothing in a step waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import MeterKwargs
from accel_core.plugins.loading import DataLoaderConfiguration

DEVICE = torch.device("cuda", 0)
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "capturable": partial(torch.optim.AdamW, lr=1e-2, capturable=DEVICE.type != "cpu"),
}
BATCH, BATCHES, WIDTH = 8, 7, 32  # seven batches end in the middle of a window of three

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),  # torch's advice
]


def net() -> nn.Module:
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def rows() -> Tensor:
    """Return the data, on the CPU."""
    return torch.randn(BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that changes the rate in each step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def by_hand(make: Callable[..., torch.optim.Optimizer], precision: str, window: int, clip: float | None) -> list[Any]:
    """Train two epochs in plain PyTorch; return weights, rate and scale."""
    model = net().to(DEVICE)
    optimizer = make(model.parameters())
    rates, scaler = schedule(optimizer), torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16")
    for first in [*range(0, BATCHES, window)] * 2:
        batches = rows().split(BATCH)[first : first + window]
        for batch in batches:
            with torch.autocast(DEVICE.type, FORMATS.get(precision), enabled=precision != "no"):
                output = model(batch.to(DEVICE))
            loss = output.float().square().mean()
            scaler.scale(loss / len(batches)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:  # the step was made
            rates.step()
        optimizer.zero_grad()
    return [*model.parameters(), torch.tensor([rates.get_last_lr()[0], scaler.get_scale()])]


def by_accel(make: Callable[..., torch.optim.Optimizer], precision: str, window: int, clip: float | None) -> list[Any]:
    """Train as `by_hand` through an Accelerator."""
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=window)
    plain = net()
    optimizer = make(plain.parameters())
    loader = DataLoader(TensorDataset(rows()), batch_size=BATCH)
    model, optimizer, loader, rates = accelerator.prepare(plain, optimizer, loader, schedule(optimizer))
    for _ in range(2):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
    assert all(parameter.device == DEVICE for parameter in model.parameters())
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    return [*model.parameters(), torch.tensor([rates.get_last_lr()[0], scale])]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_is_plain_pytorch(optimizer: str, precision: str, window: int, clip: float | None) -> None:
    """Weights, rate and scale after two epochs are those of the loop by hand, bit for bit."""
    settings = (OPTIMIZERS[optimizer], precision, window, clip)
    for ours, theirs in zip(by_accel(*settings), by_hand(*settings), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_is_told_and_moves_no_schedule(optimizer: str) -> None:
    """Where the scaler finds an infinite gradient, weights, average and rate stay, whoever skips the step."""
    accelerator = Accelerator(mixed_precision="fp16")
    plain = net()
    made = OPTIMIZERS[optimizer](plain.parameters())
    model, made, rates = accelerator.prepare(plain, made, schedule(made))
    average = accelerator.ema(model, decay=0.5)
    skipped = []
    for factor in (1e-3, 1e38, 1e-3):
        before = [parameter.detach().clone() for parameter in model.parameters()], rates.get_last_lr()
        averages = [each.clone() for each in average.state.averages.values()]
        accelerator.backward(model(rows()[:BATCH].to(DEVICE)).square().mean() * factor)
        made.step()
        rates.step()
        made.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        if skipped[-1]:
            assert all(map(torch.equal, before[0], model.parameters()))
            assert all(map(torch.equal, averages, average.state.averages.values()))
        assert skipped[-1] == (rates.get_last_lr() == before[1])
    assert skipped == [False, True, False]


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Fail what makes the host wait for the device."""
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch, of the mode itself
@pytest.mark.parametrize("beside", ["nothing", "a meter", "an average", "both"])
@pytest.mark.parametrize(("precision", "window"), [("no", 1), ("bf16", 3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_waits_for_the_device(optimizer: str, precision: str, window: int, beside: str) -> None:
    """An epoch from a pinned loader: forward, backward, clipping, step, schedule, measuring and averaging."""
    meter = MeterKwargs(every=2, tokens=lambda batch: (batch[0] > 0).sum())
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=window,
        kwargs_handlers=[meter] if beside in ("a meter", "both") else [],
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    plain = net()
    made = OPTIMIZERS[optimizer](plain.parameters())
    pinned = DEVICE.type != "cpu"
    loader = DataLoader(TensorDataset(rows()), batch_size=BATCH, pin_memory=pinned)
    model, made, loader, rates = accelerator.prepare(plain, made, loader, schedule(made))
    if beside in ("an average", "both"):
        accelerator.ema(model, decay=0.9, buffers="average")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for watched in (nullcontext, nobody_waits):
        with watched():
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    made.step()
                    rates.step()
                    made.zero_grad()
    assert not any(map(torch.equal, before, model.parameters()))
