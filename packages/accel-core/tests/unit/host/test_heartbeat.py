"""Signs of life: written by loaders and optimizers, read by whoever watches, and never into a stranger's file."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.host import heartbeat
from accel_core.host.heartbeat import Heartbeat, Sensor


@pytest.fixture
def sensor() -> Iterator[Sensor]:
    """Make a record to write into."""
    made = Sensor()
    yield made
    made.close()


def test_what_is_written_is_read(sensor: Sensor) -> None:
    """Beats count up, loops are as last said, and both say when."""
    assert (sensor.read().beats, sensor.read().loops) == (0, 0)
    before = time.monotonic()
    heart = Heartbeat(sensor.path)
    heart.beat()
    heart.loops(2)
    heart.beat()
    pulse = sensor.read()
    assert (pulse.beats, pulse.loops) == (2, 2)
    assert before - 1e-6 <= pulse.at <= time.monotonic()
    sensor.reset()
    assert sensor.read() == heartbeat.Progress(0.0, 0, 0)


def test_only_a_record_is_written_to(tmp_path: Path) -> None:
    """A path that leads to nothing, or in another container to something else, is left alone."""
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    os.mkfifo(tmp_path / "pipe")
    for path in (None, "/nonexistent", str(other), str(tmp_path / "pipe"), str(tmp_path), os.devnull):
        heart = Heartbeat(path)
        heart.beat()
        heart.loops(1)
    assert other.read_bytes() == bytes(32)


def test_loaders_and_optimizers_show_that_they_live(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch, fresh_state: None
) -> None:
    """A batch and an optimizer step are a beat each; a loader is open from its first batch to its end."""
    heart = Heartbeat(sensor.path)
    monkeypatch.setattr(heartbeat, "beat", heart.beat)
    monkeypatch.setattr(heartbeat, "loops", heart.loops)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.ones(3, 1)))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    beats = []
    for (batch,) in loader:
        assert sensor.read().loops == 1
        accelerator.backward(model(batch).sum())
        optimizer.step()
        beats.append(sensor.read().beats)
    assert beats == [2, 4, 6]
    assert sensor.read().loops == 0
