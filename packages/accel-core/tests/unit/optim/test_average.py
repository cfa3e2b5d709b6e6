"""Averages of the weights of a model in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_core.accelerator import Accelerator
from accel_core.errors import CheckpointError, ConfigurationError, PreparationError, StateError

pytestmark = pytest.mark.usefixtures("fresh_state")


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return the same layers each time, with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def prepared(accelerator: Accelerator, model: nn.Module, **given: Any) -> Any:
    """Return a prepared model with its optimizer."""
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, **given))


def batches(count: int = 6) -> torch.Tensor:
    """Return batches of four rows."""
    return torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(1))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Compare parameters and buffers bit for bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def shifted(accelerator: Accelerator, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, list[torch.Tensor]]:
    """Return a model that has moved away from its average, that average, and copies of both."""
    model, _ = prepared(accelerator, net(dtype))
    ema = accelerator.ema(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    return model, ema, copy.deepcopy(model), [each.clone() for each in ema.state.averages.values()]


@pytest.fixture
def accelerator(fresh_state: None) -> Accelerator:
    """Give an Accelerator on the CPU."""
    return Accelerator(cpu=True)


def test_it_is_cast_anew_in_an_autocast_block() -> None:
    """Inside of an autocast block, the average computes inside of `applied()`, and the weights behind it."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _ = prepared(accelerator, nn.Linear(5, 2))
    ema = accelerator.ema(model)
    with torch.no_grad():
        model.weight.add_(1)
    batch, scores = batches()[0], []
    with accelerator.autocast():
        scores += [model(batch)]
        with ema.applied():
            scores += [model(batch)]
        scores += [model(batch)]
    with ema.applied():
        torch.testing.assert_close(scores[1], model(batch), rtol=0, atol=0)
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2], rtol=0, atol=0)


class Full(TorchDispatchMode):
    """A machine whose memory has room for one copy of a tensor, none for the second, and for the next ones again."""

    left = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse further copies."""
        if func is torch.ops.aten._to_copy.default:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("no memory is left")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_where_memory_runs_out(accelerator: Accelerator, dtype: torch.dtype) -> None:
    """An average that does not fit is applied in no part: weights and averages are what they were."""
    model, ema, before, averages = shifted(accelerator, dtype)
    with pytest.raises(torch.OutOfMemoryError), Full(), ema.applied():
        pytest.fail("it was applied")
    assert same(model, before)
    assert all(map(torch.equal, ema.state.averages.values(), averages))
    with ema.applied():
        assert not same(model, before)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_it_is_torchs_average_of_steps_that_were_made(every: int, buffers: Any) -> None:
    """With accumulation and a frozen layer, every n-th step is averaged as `AveragedModel` does; weights come back."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model[2].bias.requires_grad_(False)
    model, optimizer = prepared(accelerator, model)
    ema = accelerator.ema(model, 0.75, every, buffers=buffers)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=buffers == "average")
    theirs.update_parameters(model)
    for number, batch in enumerate(batches(8)):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if number % (2 * every) == 2 * every - 1:
            theirs.update_parameters(model)
    if buffers == "copy":
        for mine, own in zip(theirs.module.buffers(), model.buffers(), strict=True):
            mine.copy_(own)
    theirs.module[1].num_batches_tracked.copy_(model[1].num_batches_tracked)
    before = copy.deepcopy(model)
    with ema.applied() as applied:
        assert applied is model
        assert same(model, theirs.module)
    assert same(model, before)


class Complex(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return numbers that have both parts of the factor in them."""
        found: torch.Tensor = batch * self.factor
        return found.real + 2 * found.imag


def test_complex_weights_are_averaged_and_restored(accelerator: Accelerator, tmp_path: Path) -> None:
    """Both parts of each number are averaged; a checkpoint has them."""
    model, optimizer = prepared(accelerator, Complex())
    ema = accelerator.ema(model, 0.75)
    expected = model.factor.detach().clone()
    for batch in batches(4):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        expected = 0.75 * expected + 0.25 * model.factor.detach()
    weight = model.factor.detach().clone()
    accelerator.save_state(str(tmp_path / "state"))
    for average in ema.state.averages.values():
        average.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    with ema.applied():
        torch.testing.assert_close(model.factor.detach(), expected)
        assert (model.factor.detach() != weight).all()
    assert torch.equal(model.factor, weight)


def test_values_are_not_loaded_into_an_applied_average(accelerator: Accelerator) -> None:
    """A state is refused for the model and each part of it, and changes nothing; a copy made inside takes it."""
    model, ema, before, _ = shifted(accelerator)
    other = net()
    with ema.applied():
        shown = copy.deepcopy(model)
        for part, state in ((model, other.state_dict()), (model[0], other[0].state_dict())):
            with pytest.raises(StateError, match=r"got load_state_dict\(\) there"):
                part.load_state_dict(state)
        assert same(model, shown)
        shown.load_state_dict(before.state_dict())
    assert same(model, before)
    assert same(shown, before)
    model.load_state_dict(other.state_dict())
    assert same(model, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_cast_inside_keeps_weights_and_average(accelerator: Accelerator, dtype: torch.dtype) -> None:
    """Weights come back in the new format, and the average loses nothing."""
    model, ema, before, averages = shifted(accelerator)
    with ema.applied():
        model.to(dtype)
        assert torch.equal(model[0].weight, averages[0].to(dtype))
    assert same(model, before.to(dtype))
    assert all(map(torch.equal, ema.state.averages.values(), averages))


def test_a_second_optimizer_does_not_count_for_the_first(accelerator: Accelerator) -> None:
    """Where two optimizers train parts of a model, each part is averaged once for each step of its own."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    model, *optimizers = accelerator.prepare(model, *both)
    ema = accelerator.ema(model, 0.5)
    expected = [each.detach().clone() for each in model.parameters()]
    for number, batch in enumerate(batches(4)):
        accelerator.backward(model(batch).square().mean())
        for optimizer in optimizers[: 1 + number % 2]:
            optimizer.step()
        accelerator.backward(model(batch).sum() * 0)
        stepped = list(model[: 1 + number % 2].parameters())
        torch._foreach_lerp_(expected[: len(stepped)], stepped, 0.5)
    with ema.applied():
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_not_averaged(accelerator: Accelerator, fused: bool) -> None:
    """Infinite gradients leave the average alone, also where a fused optimizer skips by itself."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = prepared(accelerator, nn.Linear(5, 2), fused=fused)
    ema = accelerator.ema(model, 0.5)
    start = model.weight.detach().clone()
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(model(batches()[0]).square().mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
        if factor == 1.0:
            start.lerp_(model.weight.detach(), 0.5)
    with ema.applied():
        assert torch.equal(model.weight, start)


def test_weights_in_sixteen_bits_are_averaged_in_more(accelerator: Accelerator, tmp_path: Path) -> None:
    """The average of bf16 weights has 32 bits and moves by shares that bf16 would lose; it is saved in bf16."""
    model, optimizer = prepared(accelerator, net(torch.bfloat16))
    ema = accelerator.ema(model, 0.999, device="cpu")
    expected = [each.detach().float() for each in model.parameters()]
    for batch in batches():
        accelerator.backward(model(batch.bfloat16()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(expected, [each.detach().float() for each in model.parameters()], 1 - 0.999)
    for mine, theirs in zip(ema.state.averages.values(), expected, strict=True):
        assert torch.equal(mine, theirs)
    before = copy.deepcopy(model)
    accelerator.save_model(ema, tmp_path)
    assert same(model, before)
    found = load_file(tmp_path / "model.safetensors")
    for (name, _), theirs in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(found[name], theirs.bfloat16())


def test_it_is_saved_and_restored_with_the_state(accelerator: Accelerator, tmp_path: Path) -> None:
    """A run that is resumed goes on with the average and the count of steps; a checkpoint without one is refused."""
    model, optimizer = prepared(accelerator, net())
    accelerator.save_state(str(tmp_path / "without"))
    ema = accelerator.ema(model, 0.75, every=2)

    def train(count: int) -> dict[str, torch.Tensor]:
        for batch in batches(count):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with ema.applied():
            return {name: value.clone() for name, value in model.state_dict().items()}

    train(3)
    accelerator.save_state(str(tmp_path / "with"))
    first = train(2)
    with pytest.raises(CheckpointError, match=r"optimizer_1\.bin is not there"):
        accelerator.load_state(str(tmp_path / "without"))
    accelerator.load_state(str(tmp_path / "with"))
    second = train(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with ema.applied():
        for call in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(StateError, match=r"got save_state\(\) or load_state\(\) there"):
                call(str(tmp_path / "with"))
        with pytest.raises(StateError, match=r"got applied\(\) there"), ema.applied():
            pytest.fail("an average was applied twice")
    accelerator.free_memory()
    assert not accelerator._runtime.averages


def test_bad_input_is_refused_by_name(accelerator: Accelerator) -> None:
    """Wrong settings, and models that were not prepared or do not train, are refused and change nothing."""
    with pytest.raises(PreparationError, match=r"got a Linear that was not prepared\. Call accelerator\.prepare"):
        accelerator.ema(nn.Linear(2, 2))
    model, _ = prepared(accelerator, net())
    with pytest.raises(PreparationError, match="got a list that was not prepared"):
        accelerator.ema([model])  # type: ignore[arg-type]
    settings: list[tuple[dict[str, Any], str]] = [
        *(({"decay": decay}, "from 0 to 1; got") for decay in (-0.1, 1.1, float("nan"))),
        *(({"every": every}, "every 1 or more optimizer steps; got") for every in (0, -1)),
        ({"buffers": "both"}, "got 'both'"),
    ]
    for given, words in settings:
        with pytest.raises(ConfigurationError, match=words):
            accelerator.ema(model, **given)
    frozen = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(PreparationError, match="got a Linear without any"):
        accelerator.ema(frozen)
    assert not accelerator._runtime.averages
    ema = accelerator.ema(model)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    with pytest.raises(StateError, match="got 1 more: scale"), ema.applied():
        pytest.fail("a parameter without an average was left as it is")
