"""What `accel check-resume` makes repeatable, and compares of random numbers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.devices.cpu import CpuDevice
from accel_verify.resume import recorder


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave this process's kernels and arguments as they were."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("left_alone")
def test_scripts_run_with_kernels_that_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of a GPU in any order would make two runs differ that resume exactly; what torch lacks is warned of."""
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(torch.get_deterministic_debug_mode())\n")
    monkeypatch.setattr(recorder.ResumeRecorder, "install", lambda _: None)
    recorder.main([str(tmp_path / "record"), "0", "2", "-", "-", "-", str(script)])
    assert capsys.readouterr().out == "1\n"


@pytest.mark.usefixtures("fresh_state")
def test_random_numbers_of_the_device_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another state of its generator, from which dropout of a GPU draws, is another random state."""
    accelerator, watched = Accelerator(cpu=True), recorder.ResumeRecorder(io.StringIO(), 0, 1, "-", "-", "-")
    found = []
    for value in (0, 1, 1):
        monkeypatch.setattr(CpuDevice, "rng_state", lambda _, value=value: torch.tensor([value], dtype=torch.uint8))
        found.append(watched._state(accelerator)["random states"])
    assert found[0] != found[1] == found[2]
