"""The meter of training steps in one process."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_core.host.run_card import RunCard
from accel_core.metering import _PARTS, Measurement, _peak_flops
from accel_core.plugins.handlers import MeterKwargs
from accel_core.state.gradient import GradientState
from accel_core.strategies.strategy import Strategy
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import requires

pytestmark = pytest.mark.usefixtures("fresh_state")
NAP = 0.02
"""Seconds that a part is made to take, which any machine tells from none."""


class Rows(Dataset[Any]):
    """Rows of numbers, each after a moment if that is asked for."""

    def __init__(self, count: int, nap: float = 0.0) -> None:
        self.values = torch.rand(count, 16, generator=torch.Generator().manual_seed(1))
        self.nap = nap

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        """Return one."""
        time.sleep(self.nap)
        return self.values[index]


class Net(nn.Module):
    """A convolution, attention and products, with dropout, of which a part may be computed again for backward."""

    def __init__(self, *, again: bool | None = None, nap: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.enter, self.leave = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(16, 32), nn.Linear(32, 2)
        self.shift = nn.Parameter(torch.zeros(16))
        self.drop, self.again, self.nap = nn.Dropout(0.5), again, nap

    def inner(self, values: Tensor) -> Tensor:
        """Return the hidden values."""
        hidden = self.drop(self.enter(self.mix(values[:, None]))).relu()
        return scaled_dot_product_attention(hidden, hidden, hidden)

    def forward(self, values: Tensor) -> Tensor:
        """Return two numbers for each of four channels."""
        if self.nap:
            time.sleep(self.nap)
        values = values + self.shift
        if self.again is None:
            hidden = self.inner(values)
        else:
            hidden = checkpoint(self.inner, values, use_reentrant=self.again)
        found: Tensor = self.leave(hidden)
        return found


def metered(every: int = 1, **given: Any) -> Accelerator:
    """Return an Accelerator with a meter."""
    settings = {name: given.pop(name) for name in ("flops", "peak_flops", "tokens") if name in given}
    return Accelerator(cpu=True, kwargs_handlers=[MeterKwargs(every=every, **settings)], **given)


def measured(accelerator: Accelerator) -> Measurement:
    """Return the last numbers."""
    assert accelerator.meter is not None
    assert accelerator.meter.last is not None
    return accelerator.meter.last


def prepared(accelerator: Accelerator, model: nn.Module, loader: Any, rate: float = 0.01) -> Any:
    """Return a model, its optimizer and a loader."""
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate), loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Train an epoch, and return after each batch."""
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        yield batch


def counted(model: nn.Module, batch: Tensor) -> int:
    """Return what torch counts for a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        model(batch).square().mean().backward()
    return counter.get_total_flops()


def seconds_of(found: Measurement) -> list[float]:
    """Return the parts of a step."""
    return [getattr(found, name) for name in _PARTS[:-1]]


def test_each_part_has_its_time_and_all_sum_to_the_wall(tmp_path: Path) -> None:
    """A moment in each part is found there, evaluation is apart, and all is what a clock around the loop says."""
    accelerator = metered(every=3, gradient_accumulation_steps=2, flops=None)
    model, optimizer, loader = prepared(accelerator, Net(nap=NAP), DataLoader(Rows(32, NAP / 4), batch_size=4))
    test = accelerator.prepare(DataLoader(Rows(8, NAP / 4), batch_size=4))
    before, behind = [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            loss.register_hook(lambda gradient: time.sleep(2 * NAP))
            accelerator.backward(loss)
            time.sleep(NAP)
            before += [time.perf_counter()] * (number % 2)
            optimizer.step()
        if number % 2:
            behind.append(time.perf_counter())
            accelerator.save_state(str(tmp_path / "state"))
            for rows in test:
                with torch.no_grad():
                    model(rows)
    found = measured(accelerator)
    assert found.steps == 2  # of three: the first is not measured
    assert found.seconds == pytest.approx(sum(seconds_of(found)))
    # A step ends while the optimizer makes it, and a busy machine may hold the clock up before that or behind.
    assert (before[2] - behind[0]) / 2 < found.seconds + found.evaluation < (behind[2] - before[0]) / 2
    least = {"waiting": 2 * NAP, "forward": 2 * NAP, "backward": 4 * NAP, "rest": 2 * NAP, "evaluation": 4 * NAP}
    assert all(getattr(found, name) >= seconds for name, seconds in least.items())
    assert found.saving > 0
    assert found.optimizer > 0
    assert found.exchange == 0
    assert found.samples_per_second == pytest.approx(8 / found.seconds)
    assert found.flops is None
    assert found.mfu is None


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_flops_are_those_that_torch_counts(again: bool | None, window: int) -> None:
    """With and without accumulation and evaluation, the second forward pass of a checkpoint does not count."""
    accelerator = metered(gradient_accumulation_steps=window)
    model, optimizer, loader = prepared(accelerator, Net(again=again), DataLoader(Rows(32), batch_size=4))
    test = accelerator.prepare(DataLoader(Rows(6), batch_size=3))
    for batch in train(accelerator, model, optimizer, loader):
        for rows in test:
            model(rows)  # with gradients, which nothing follows
        expected = counted(Net(), batch)
    found = measured(accelerator)
    assert found.flops == window * expected
    assert found.flops_per_second == pytest.approx(found.flops / found.seconds)
    peak = _peak_flops(accelerator.device, torch.float32)
    assert peak is not None
    assert found.mfu == pytest.approx(found.flops / found.seconds / peak)


def test_each_shape_is_counted_once_and_both_of_two_passes() -> None:
    """A shorter batch has its own FLOPs; two passes before a backward pass add up; those of new shapes are no step."""
    accelerator = metered()
    model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(7), batch_size=4))
    expected = {count: counted(Net(), torch.rand(count, 16)) for count in (4, 3)}
    for epoch in range(3):
        for batch in loader:
            accelerator.backward(model(batch).square().mean() + model(batch[:2]).square().mean())
            optimizer.step()
            if epoch == 2:
                assert measured(accelerator).flops == expected[len(batch)] + counted(Net(), batch[:2])
    assert len(accelerator.meter._backward_flops) == 3  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "given", "in place"])
def test_a_compiled_model_has_the_same_flops_and_stays_compiled(how: str) -> None:
    """FLOPs of compiled passes are those of plain ones, whose results they keep."""
    torch._dynamo.reset()
    model: Any = Net().eval()
    if how == "in place":
        model.compile(backend="aot_eager")
    given = torch.compile(model, backend="aot_eager") if how == "given" else model
    accelerator = metered(**({"dynamo_backend": "aot_eager"} if how == "whole" else {}))
    model, optimizer, loader = prepared(accelerator, given, DataLoader(Rows(12), batch_size=4))
    for _ in train(accelerator, model, optimizer, loader):
        found = accelerator.meter.last  # type: ignore[union-attr]
    assert found is not None
    assert found.flops == counted(Net(), torch.rand(4, 16))
    assert found.forward > 0
    assert "CompiledFunction" in type(model(torch.rand(4, 16)).grad_fn).__name__
    torch._dynamo.reset()


def test_training_is_the_same_with_a_meter() -> None:
    """Weights after an epoch with dropout, and the random state, are those of a run without a meter, bit for bit."""
    results = []
    for accelerator in (Accelerator(cpu=True), metered(every=2)):
        model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(18), batch_size=4, shuffle=True))
        for _ in train(accelerator, model, optimizer, loader):
            pass
        results.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "masked", "expected"),
    [("ids", True, 9), (lambda batch: batch["ids"].numel(), True, 16), ("ids", False, 16)],
)
def test_tokens_are_counted_as_asked(
    tokens: Any, masked: bool, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry counts where its mask says so, whole and with a warning without one, and a function as it says."""
    accelerator = metered(tokens=tokens, flops=None)
    masks = [{"attention_mask": (torch.arange(8) < length).long()} if masked else {} for length in (3, 5, 8, 1)]
    rows: Any = [{"ids": torch.arange(8.0), **mask} for mask in masks]
    layer, optimizer, loader = prepared(accelerator, nn.Linear(8, 1), DataLoader(rows, batch_size=2))
    for batch in loader:
        accelerator.backward(layer(batch["ids"]).mean())
        optimizer.step()
    found = measured(accelerator)
    assert found.tokens_per_second == pytest.approx(expected / found.seconds)
    assert ("without an 'attention_mask'" in caplog.text) is not masked


def test_tokens_of_a_missing_entry_are_refused() -> None:
    """The error names the argument and asks for an entry that is there."""
    accelerator = metered(tokens="ids", flops=None)
    for rows in (DataLoader(Rows(4)), DataLoader([{"x": 1}])):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"tokens='ids' of MeterKwargs is an entry .* Name one of"):
            next(iter(accelerator.prepare(rows)))


def test_numbers_of_the_user_and_unknown_devices() -> None:
    """FLOPs of a sample and a peak can be given; without a known peak there are FLOPs and no utilization."""
    for given in ({"flops": 10.0, "peak_flops": 1e6}, {"peak_flops": None}):
        accelerator = metered(**given)
        model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(12), batch_size=4))
        for _ in train(accelerator, model, optimizer, loader):
            pass
        found = measured(accelerator)
        if "flops" in given:
            assert found.flops == 40
            assert found.mfu == pytest.approx(40 / found.seconds / 1e6)
        else:
            assert found.flops == counted(Net(), torch.rand(4, 16))
            assert found.mfu is None
    assert _peak_flops(torch.device("meta"), torch.float32) is None
    assert _peak_flops(torch.device("cpu"), None) is None


@requires("torch:2.9")  # before, there is one setting
@pytest.mark.parametrize(("setting", "teraflops"), [("tf32", 494.7), ("ieee", 67), ("none", 67)])
def test_the_peak_follows_the_newer_matmul_setting(
    setting: str, teraflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that asks for TF32 by it is measured as one that asks for it by the older one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        assert _peak_flops(torch.device("cuda"), torch.float32) == pytest.approx(teraflops * 1e12)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class Event:
    """Stands in for an event of a device, which passes when the device comes to it; nothing can wait for it."""

    made: ClassVar[list[Event]] = []
    passed: ClassVar[int] = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Put it behind the others."""
        self.number = len(self.made)
        self.made.append(self)

    def query(self) -> bool:
        """Return whether the device came to it."""
        return self.number < Event.passed

    def elapsed_time(self, end: Event) -> float:
        """Return 10 milliseconds for each event in between."""
        assert end.query(), "read before it passed"
        return 10.0 * (end.number - self.number)


def test_a_step_on_a_device_is_read_once_its_events_have_passed() -> None:
    """Marks are events in the order of the parts; a step that is not over on the device waits for the next time."""
    accelerator = metered(every=2, flops=None)
    meter: Any = accelerator.meter
    meter._event, meter._clock = Event, meter._mark_stream
    meter.restart()
    model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(24), batch_size=4))
    found = []
    for number, _ in enumerate(train(accelerator, model, optimizer, loader)):
        found.append((meter.last and meter.last.steps, len(meter._done)))
        Event.passed = len(Event.made) if number in (2, 4) else Event.passed
    assert found == [(None, 1), (None, 2), (None, 3), (2, 1), (2, 2), (2, 1)]
    assert meter.last.seconds == pytest.approx(sum(seconds_of(meter.last)))
    # A batch, a pass in each direction and a step begin and end, and what was behind one is before the next.
    assert meter.last.waiting == meter.last.forward == meter.last.backward == pytest.approx(0.01)


class Kept(GeneralTracker):
    """A tracker that keeps what it gets."""

    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[dict[str, Any], int | None]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep nothing of it."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep the values."""
        self.entries.append((values, step))


@pytest.mark.parametrize("given", [True, False])
def test_trackers_get_the_numbers_at_the_step_logged_last(given: bool) -> None:
    """The numbers come under the step of the script, whose own values keep their steps."""
    tracker = Kept()
    accelerator = metered(every=2, log_with=tracker)
    model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(16), batch_size=4))
    accelerator.init_trackers("run")
    for number, _ in enumerate(train(accelerator, model, optimizer, loader)):
        accelerator.log({"loss": number}, **({"step": 10 * number} if given else {}))
    accelerator.end_training()
    numbers = [(values, step) for values, step in tracker.entries if "loss" not in values]
    assert [step for _, step in numbers] == ([0, 20] if given else [None, None])
    assert numbers[-1][0]["meter/flops"] == measured(accelerator).flops
    assert "meter/tokens_per_second" not in numbers[-1][0]
    assert accelerator._runtime.hub.state_dict()["steps"]["last"] == (30 if given else 3)


def test_failed_passes_and_broken_loops_leave_it_whole() -> None:
    """After an error in forward, a `break`, and a backward pass that failed, steps are measured as before."""
    accelerator = metered()
    model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(12), batch_size=4))
    for _ in loader:
        with pytest.raises(RuntimeError):
            model(torch.rand(4, 3))
        loss = model(torch.rand(4, 16)).sum()
        accelerator.backward(loss)
        with pytest.raises(RuntimeError):
            accelerator.backward(loss)
        break
    for batch in train(accelerator, model, optimizer, loader):
        expected = counted(Net(), batch)
    found = measured(accelerator)
    assert found.flops == expected
    assert found.seconds == pytest.approx(sum(seconds_of(found)))
    assert found.samples_per_second == pytest.approx(4 / found.seconds)


def test_foreign_gradients_have_no_flops_and_count_as_steps() -> None:
    """A loop that calls `loss.backward()` itself has its time and samples, and the passes are not kept."""
    accelerator = metered()
    model, optimizer, loader = prepared(accelerator, Net(nap=NAP), DataLoader(Rows(12), batch_size=4))
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
    found = measured(accelerator)
    assert found.forward >= NAP
    assert found.evaluation == 0
    assert found.samples_per_second == pytest.approx(4 / found.seconds)
    assert found.flops is None
    assert not accelerator.meter._reading.passes  # type: ignore[union-attr]


def test_of_two_optimizers_the_first_ends_the_steps() -> None:
    """A step with two optimizers, of which the second trains with the same batch, is one step with all its samples."""
    accelerator = metered(flops=None)
    nets = [Net(), Net()]
    both = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    first, second, *optimizers, loader = accelerator.prepare(*nets, *both, DataLoader(Rows(12), batch_size=4))
    for batch in loader:
        for net, optimizer in zip((first, second), optimizers, strict=True):
            accelerator.backward(net(batch).mean())
            optimizer.step()
    found = measured(accelerator)
    assert found.steps == 1
    assert found.samples_per_second == pytest.approx(4 / found.seconds)


class Stream(IterableDataset[Tensor]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield some."""
        yield from torch.rand(14, 16)


def test_loaders_read_together_and_streams_count_once() -> None:
    """Of two loaders in one `zip` the second one's samples count, and the first one's wait is no evaluation."""
    accelerator = metered(every=3, flops=None)
    model, optimizer, slow = prepared(accelerator, Net(), DataLoader(Rows(14, NAP), batch_size=4))
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    for one, other in zip(slow, stream, strict=True):
        accelerator.backward(model(one).mean() + model(other).mean())
        optimizer.step()
    accelerator.meter.report()  # type: ignore[union-attr]
    found = measured(accelerator)
    assert found.steps == 2 or found.steps == 1
    assert found.waiting >= 2 * NAP
    assert found.evaluation == 0


def test_copies_of_a_prepared_model_are_not_measured() -> None:
    """Copies run on their own weights and are not measured; the model itself is."""
    accelerator = metered()
    bare = Net()
    model, _, _ = prepared(accelerator, bare, DataLoader(Rows(4)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.nn.init.zeros_(other.leave.weight)
        assert torch.equal(other.eval()(torch.rand(2, 16)), other.leave.bias.expand(2, 4, 2))
    assert model is bare
    assert not accelerator.meter._reading.passes  # type: ignore[union-attr]
    model(torch.rand(2, 16))
    assert len(accelerator.meter._reading.passes) == 1  # type: ignore[union-attr]
    accelerator.free_memory()


def test_nothing_is_loaded_without_it() -> None:
    """A run without the handler imports neither the meter nor what counts FLOPs, and has optimizers as ever."""
    code = (
        "import sys, torch; from accel_core.accelerator import Accelerator\n"
        "run = Accelerator(cpu=True); layer = torch.nn.Linear(2, 2)\n"
        "layer, optimizer = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1))\n"
        "run.backward(layer(torch.rand(1, 2)).sum()); optimizer.step()\n"
        "assert run.meter is None and type(layer) is torch.nn.Linear\n"
        "assert type(optimizer).__name__ == 'AcceleratedOptimizer'\n"
        "sys.exit(sum(name in sys.modules for name in ('accel_core.metering', 'torch.utils.flop_counter')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_launcher_learns_the_utilization(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a launcher reads the run's card, the utilization is on it when an epoch ends."""
    path = tmp_path / "card"
    path.write_text("accel-card\n")
    card = RunCard(str(path))
    for module in ("accel_core.metering", "accel_core.state.gradient"):
        monkeypatch.setattr(f"{module}.card", card)
    accelerator = metered()
    for _ in train(accelerator, *prepared(accelerator, Net(), DataLoader(Rows(12), batch_size=4))):
        pass
    assert json.loads(path.read_text().splitlines()[1])["mfu"] == measured(accelerator).mfu


def test_passes_that_no_step_follows_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither marks nor passes pile up; the step that they belong to is not measured, the next one is."""
    monkeypatch.setattr("accel_core.metering._MOST", 20)
    accelerator = metered()
    model, optimizer, loader = prepared(accelerator, Net(), DataLoader(Rows(12), batch_size=4))
    test = accelerator.prepare(DataLoader(Rows(400), batch_size=4))
    epoch = train(accelerator, model, optimizer, loader)
    next(epoch)
    for batch in test:
        with torch.no_grad():
            model(batch)
        model(batch)
    meter = accelerator.meter
    assert meter is not None
    assert max(len(meter._marks), len(meter._reading.passes)) < 30
    next(epoch)
    assert meter.last is None
    next(epoch)
    assert measured(accelerator).steps == 1


def test_a_model_in_the_place_of_a_freed_one_has_its_own_flops() -> None:
    """Nothing is kept of a model that is gone, at whose address another one may be made."""
    accelerator = metered()
    for width in (8, 16, 32):
        model, optimizer, loader = prepared(accelerator, nn.Linear(16, width), DataLoader(Rows(16), batch_size=4))
        batch = list(train(accelerator, model, optimizer, loader))[-1]
        assert measured(accelerator).flops == counted(nn.Linear(16, width), batch)
        accelerator.free_memory()
        del model, optimizer, loader
        gc.collect()
        assert accelerator.meter is not None
        assert not accelerator.meter._models


def test_an_engine_that_makes_its_own_steps_has_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when the run begins, and nothing would have been measured."""
    monkeypatch.setattr(Strategy, "divides_loss", False)
    with pytest.raises(
        EngineUnavailableError, match="A meter sees the steps of prepared optimizers; got MeterKwargs under"
    ):
        metered()
    assert not GradientState().extensions
