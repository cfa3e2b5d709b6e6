"""Two models that train with one gradient scaler, as a generator and a discriminator do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import GradScalerKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")


def made(accelerator: Accelerator) -> tuple[list[Any], list[Any], list[Any]]:
    """Return two models, their optimizers, and copies that nobody prepared."""
    torch.manual_seed(0)
    plain = [nn.Linear(4, 1), nn.Linear(4, 1)]
    models = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return list(prepared[:2]), list(prepared[2:]), plain


def scaled(enabled: bool = True, **given: Any) -> Accelerator:
    """Return an Accelerator whose scale, if there is one, changes with every update."""
    scaler = GradScalerKwargs(init_scale=64.0, growth_interval=1, enabled=enabled)
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler], **given)


def step(accelerator: Accelerator, optimizer: Any, model: Any, loss: torch.Tensor) -> None:
    """Make a step by a loss, with gradients that clipping unscaled, and clear them."""
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()


def train_plainly(plain: list[nn.Module], batches: list[torch.Tensor]) -> None:
    """Step both models by the mean over some batches."""
    for model in plain:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (sum(model(batch).mean() for batch in batches) / len(batches)).backward()
        optimizer.step()
        model.zero_grad()


def compare(models: list[Any], plain: list[nn.Module]) -> None:
    """Compare weights, within what fp16 rounds."""
    for model, expected in zip(models, plain, strict=True):
        torch.testing.assert_close(model.weight, expected.weight, rtol=0, atol=1e-3)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_losses_come_before_steps(enabled: bool, clips: bool) -> None:
    """Where both losses come before both steps, one scale holds for both, or none; unscaled by clipping or not."""
    accelerator = scaled(enabled)
    models, optimizers, plain = made(accelerator)
    for batch in torch.rand(3, 2, 4):
        for model in models:
            accelerator.backward(model(batch).mean())
        if clips:
            accelerator.clip_grad_norm_([p for model in models for p in model.parameters()], 1e6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        train_plainly(plain, [batch])
        compare(models, plain)
    assert accelerator.scaler.get_scale() == (512.0 if enabled else 1.0), "it grew once for each step of both"


def test_steps_in_turn_and_windows() -> None:
    """Where each model steps before the other's loss, and batches add up, all batches of a window have one scale."""
    accelerator = scaled(gradient_accumulation_steps=2)
    models, optimizers, plain = made(accelerator)
    batches = torch.rand(6, 2, 4)
    for number, batch in enumerate(batches):
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(accelerator, optimizer, model, model(batch).mean())
        if number % 2:
            train_plainly(plain, [batches[number - 1], batch])
            compare(models, plain)


def test_one_may_step_alone_and_often(tmp_path: Path) -> None:
    """An optimizer that steps while the other rests adapts the scale each time, and a checkpoint has that scale."""
    accelerator = scaled()
    models, optimizers, plain = made(accelerator)
    for batch in torch.rand(3, 2, 4):
        step(accelerator, optimizers[0], models[0], models[0](batch).mean())
        train_plainly(plain[:1], [batch])
    compare(models, plain)
    accelerator.save_state(str(tmp_path))
    assert accelerator.scaler.get_scale() == 512.0
    accelerator.backward(models[0](torch.full((2, 4), torch.inf)).mean())
    optimizers[0].step()
    assert optimizers[0].step_was_skipped
    accelerator.load_state(str(tmp_path))
    assert accelerator.scaler.get_scale() == 512.0


def test_what_is_released_leaves_no_trace_in_the_scaler() -> None:
    """The next optimizer may have the identity of one that was unscaled and let go of; exchanged steps are called."""
    accelerator, calls = scaled(), []
    models, optimizers, _ = made(accelerator)
    inner = optimizers[0].optimizer
    plain, inner.step = inner.step, lambda *args: (calls.append(1), plain(*args))[1]
    for _ in range(2):
        accelerator.backward(models[0](torch.rand(2, 4)).mean())
        optimizers[0].step()
    assert calls == [1, 1]
    accelerator.backward(models[0](torch.rand(2, 4)).mean())
    accelerator.clip_grad_norm_(models[0].parameters(), 1.0)
    accelerator.free_memory()
    assert not accelerator.scaler._per_optimizer_states


@pytest.mark.parametrize("clears", [True, False])
def test_a_step_may_be_left_out_after_clipping(clears: bool) -> None:
    """Unscaled gradients that stay are scaled again for those of the next loss; ones that are cleared are forgotten."""
    accelerator = scaled()
    models, optimizers, plain = made(accelerator)
    batches = torch.rand(2, 2, 4)
    for number, batch in enumerate(batches):
        accelerator.backward(models[0](batch).mean() / (1 if clears else 2))
        accelerator.clip_grad_norm_(models[0].parameters(), 1e6)
        if clears and number == 0:
            optimizers[0].zero_grad(set_to_none=False)
    optimizers[0].step()
    train_plainly(plain[:1], list(batches[1:] if clears else batches))
    compare(models[:1], plain[:1])
