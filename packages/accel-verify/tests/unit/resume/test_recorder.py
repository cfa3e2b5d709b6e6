"""What `accel check-resume` makes repeatable, and compares of random numbers."""

from __future__ import annotations

import dataclasses
import io
import random
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
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


@pytest.mark.usefixtures("fresh_state")
def test_every_random_number_counts() -> None:
    """One number more or less is another random state, of NumPy's generator too, which fills its table rarely."""
    numpy = pytest.importorskip("numpy", reason="needs numpy, which accel-verify does not")
    accelerator, watched = Accelerator(cpu=True), recorder.ResumeRecorder(io.StringIO(), 0, 1, "-", "-", "-")
    for name, draw in {"torch": torch.rand, "Python": lambda _: random.random(), "NumPy": numpy.random.rand}.items():
        draw(1)
        before = watched._state(accelerator)["random states"]
        assert watched._state(accelerator)["random states"] == before
        draw(1)
        after = watched._state(accelerator)["random states"]
        assert {each for each in before if before[each] != after[each]} - {"device"} == {name}


@dataclasses.dataclass
class Batch:
    """A batch of a class of its own."""

    inputs: torch.Tensor


class Graph:
    """A batch whose text says nothing of its values, and which holds itself."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs, self.whole, self.note = inputs, self, object()

    def __repr__(self) -> str:
        return "Graph"


@pytest.mark.parametrize(
    "container",
    [
        lambda tensor: tensor,
        lambda tensor: {"inputs": [tensor]},
        lambda tensor: UserDict(inputs=tensor),  # as tokenizers give
        lambda tensor: UserDict(inputs=tensor.numpy()),
        lambda tensor: [tensor.numpy()],
        lambda tensor: Batch(tensor),
        lambda tensor: [Graph(tensor)],
    ],
)
@pytest.mark.parametrize("size", [2, 2000])
def test_every_element_of_a_batch_counts(container: Callable[[torch.Tensor], object], size: int) -> None:
    """The text of an array shows some digits, and a few elements of a large one; a batch is compared by all."""
    pytest.importorskip("numpy", reason="needs numpy, which accel-verify does not")
    batch = torch.linspace(0, 1, size)
    other = batch.clone()
    other[size // 2] += 2**-23
    assert recorder.digest(container(batch)) == recorder.digest(container(batch.clone()))
    assert recorder.digest(container(batch)) != recorder.digest(container(other))
