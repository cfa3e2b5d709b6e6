"""What the meter, the profiler and averages find on a GPU, and what is told where its memory runs out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from accel_core.accelerator import Accelerator
from accel_core.host.run_card import MEMORY_RAN_OUT
from accel_core.metering import Measurement
from accel_core.plugins.handlers import MeterKwargs, ProfileKwargs
from accel_testing import limits

DEVICE = torch.device("cuda", 0)
WIDTH, BATCH = 1024, 256
KNOWN = ("H100 80GB HBM3", "H200", "A100", "L40S")
"""Names of cards whose peak is in the meter's table."""
PARTS = ("waiting", "forward", "backward", "exchange", "optimizer", "saving", "rest")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


def net() -> nn.Module:
    """Return products that keep a GPU busy for a moment."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Metered:
    """A run with a meter that reports when it is asked."""

    def __init__(self, batches: int = 8, **settings: Any) -> None:
        self.accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[MeterKwargs(every=1000)], **settings)
        plain = net()
        loader = DataLoader(TensorDataset(torch.randn(batches * BATCH, WIDTH)), batch_size=BATCH)
        optimizer = torch.optim.AdamW(plain.parameters())
        prepared: Any = self.accelerator.prepare(plain, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    def step(self, batch: Tensor) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(batch).square().mean())
        self.optimizer.step()

    def train(self) -> Iterator[None]:
        """Train an epoch, and return behind each step."""
        for (batch,) in self.loader:
            self.step(batch)
            yield

    def report(self) -> Measurement | None:
        """Wait for the device, and return what was measured."""
        if DEVICE.type != "cpu":
            torch.cuda.synchronize()
        meter = self.accelerator.meter
        assert meter is not None
        meter.report()
        return meter.last


def test_flops_and_utilization() -> None:
    """FLOPs are those that torch counts for a step, and a card that is known by its name has a share of its peak."""
    run = Metered()
    for _ in run.train():
        pass
    found, twin = run.report(), net().to(DEVICE)
    assert found is not None
    with FlopCounterMode(display=False) as counter:
        twin(torch.randn(BATCH, WIDTH, device=DEVICE)).square().mean().backward()
    assert found.flops == counter.get_total_flops()
    assert found.steps == 7
    assert found.peak_memory > sum(each.nbytes for each in twin.parameters())
    assert found.samples_per_second == pytest.approx(BATCH / found.seconds)
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type != "cpu" else "CPU"
    if found.mfu is None:
        assert not any(word in name for word in KNOWN), name
    else:
        assert 0 < found.mfu < 1


def test_the_parts_are_the_wall() -> None:
    """Parts sum to the step, and steps to what other events say, from the end of the first to that of the last."""
    run, ends = Metered(batches=100), []
    for _ in run.train():
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    found = run.report()
    assert found is not None
    assert found.steps == len(ends) - 1
    assert found.seconds == pytest.approx(sum(getattr(found, name) for name in PARTS))
    wall = ends[0].elapsed_time(ends[-1]) / 1e3 / found.steps
    assert found.seconds + found.evaluation == pytest.approx(wall, rel=0.01)
    assert {each.name for each in fields(found)} > set(PARTS)
    assert min(found.forward, found.backward, found.optimizer) > 0


def test_events_are_read_late() -> None:
    """A step that the device has not come to is not waited for, and counts in the next report."""
    run, batch = Metered(), torch.randn(BATCH, WIDTH, device=DEVICE)  # one that travels would be waited for
    run.step(batch)
    run.step(batch)
    before = run.report()
    assert before is not None
    torch.cuda._sleep(2_000_000_000)  # about a second
    run.step(batch)
    assert run.accelerator.meter is not None
    run.accelerator.meter.report()
    assert run.accelerator.meter.last is before
    after = run.report()
    assert after is not before
    assert after is not None
    assert after.steps == 1


@pytest.mark.parametrize("place", [None, "cpu"])
def test_an_average_is_the_average_by_hand(place: str | None) -> None:
    """It follows every step, wherever it is kept; `applied()` puts it in the place of the weights, and takes it out."""
    accelerator = Accelerator()
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    average = accelerator.ema(model, decay=0.9, device=place)
    expected: list[Tensor] = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(5):
        accelerator.backward(model(torch.randn(4, 8, device=DEVICE)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    assert {each.device.type for each in average.state.averages.values()} == {place or DEVICE.type}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with average.applied():
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            assert parameter.device == DEVICE
            torch.testing.assert_close(parameter.detach(), mean)
    assert all(map(torch.equal, weights, model.parameters()))


def test_a_profile_has_kernels(tmp_path: Path) -> None:
    """With CUDA's activities, kernels are in the trace and take time."""
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    handler = ProfileKwargs(activities=["cpu", "cuda"], output_trace_dir=str(tmp_path))
    with accelerator.profile(handler) as profiler:
        model(torch.randn(BATCH, WIDTH, device=DEVICE)).sum().item()
    assert sum(event.self_device_time_total for event in profiler.key_averages()) > 0
    trace = json.loads((tmp_path / "profile_0.json").read_text())
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])


EXHAUSTED = """
import sys, torch
from torch import nn
from accel_core.accelerator import Accelerator
room, rows = 512 * 2**20, 2048
accelerator = Accelerator()
if accelerator.device.type != "cpu":
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
model = nn.Sequential(nn.Linear(rows, rows, bias=False))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, rows, device=accelerator.device)).sum())
optimizer.step()
kept = []
while True:
    kept.append(torch.ones(rows, rows, device=accelerator.device))
    if accelerator.device.type == "cpu" and len(kept) == 25:
        raise torch.OutOfMemoryError("CUDA out of memory.")
"""


def test_what_held_memory_is_told(tmp_path: Path) -> None:
    """Below torch's own error come the holders, the largest first, and sum to what was allocated."""
    (tmp_path / "train.py").write_text(EXHAUSTED)
    done = limits.run([sys.executable, "train.py"], cwd=tmp_path)
    assert done.returncode == 1
    head, _, told = done.stderr.partition(f"{MEMORY_RAN_OUT} on rank 0. What held it:\n")
    assert "OutOfMemoryError: CUDA out of memory." in head
    lines = told.splitlines()
    assert lines[0].startswith("  other tensors"), told
    assert "kept in <module>" in lines[0]
    for kind, size in (("parameters", "16.00"), ("gradients", "16.00"), ("optimizer", "32.00")):
        assert any(line.startswith(f"  {kind}") and f"0.weight {size} MiB" in line for line in lines), told
    if DEVICE.type != "cpu":
        assert lines[-1].startswith("  no tensor above")
