"""Runs of program.py under replicas, and what has to hold of each."""

import importlib.util
import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accel_testing import limits

__all__ = ["SAMPLES", "check", "command_of", "launched", "results"]

PROGRAM = Path(__file__).with_name("program.py")
SAMPLES = 61  # neither a multiple of the batch size, nor of the batches of two replicas


def command_of(folder: Path, *words: str, ranks: int = 1, replicas: int = 2, epochs: int = 3) -> list[str]:
    """Return the command that runs the program under replicas."""
    flags = ["--cpu", "-n", ranks, "--replicas", replicas, *(word for word in words if word.startswith("--"))]
    rest = [folder, SAMPLES, epochs, *(word for word in words if not word.startswith("--")), limits.slowness()]
    return [*map(str, [sys.executable, "-m", "accel_launch", "launch", *flags, PROGRAM, *rest])]


def launched(
    folder: Path,
    *words: str,
    ranks: int = 1,
    replicas: int = 2,
    epochs: int = 3,
    gone: int = 0,
    meanwhile: Callable[[subprocess.Popen[str]], None] = lambda run: None,
) -> dict[str, Any]:
    """Run the program under replicas; return what each rank of each found."""
    command = command_of(folder, *words, ranks=ranks, replicas=replicas, epochs=epochs)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            meanwhile(run)
        except BaseException:
            run.terminate()
            raise
        out, errors = limits.communicate(run, quiet=40)
    assert run.returncode == 0, out + errors
    return {**results(folder, ranks * (replicas - gone), errors), "report": errors}


def results(folder: Path, number: int, errors: str) -> dict[str, Any]:
    """Return what each rank of each replica found, of so many."""
    found = {path.stem.removeprefix("found-"): torch.load(path) for path in sorted(folder.glob("found-*.pt"))}
    assert len(found) == number, errors
    return found


def plain(folder: Path, ranks: int) -> tuple[Any, dict[int, list[int]]]:
    """Make the steps that were made, each with the samples of all replicas, in one process without accel.

    Args:
        folder: Where it is written down who read what.
        ranks: How many of each replica read samples of their own.
    """
    spec = importlib.util.spec_from_file_location("program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    steps: dict[int, list[int]] = defaultdict(list)
    moves: dict[int, int] = {}
    readers = [path for rank in range(ranks) for path in folder.glob(f"read-*-{rank}")]
    for line in (line for path in readers for line in path.read_text().splitlines()):
        step, replicas, *indices = map(int, line.split())
        moves[step] = replicas * ranks
        steps[step] += indices
    torch.manual_seed(0)
    model = program.Model(SAMPLES)
    optimizers = program.optimizers_of(model)
    schedule = program.schedule_of(optimizers[1])
    for step in sorted(steps):
        model(torch.tensor(sorted(steps[step]))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(moves[step]):
            schedule.step()
    return model.state_dict(), steps


def check(
    found: dict[str, Any], folder: Path, epochs: int, lives: dict[int, int], ranks: int = 1, main: int | None = None
) -> None:
    """Check that every sample was trained with once an epoch, and that all replicas end with one state.

    Unless it is given which replica speaks for the run, it is the first that never died.
    """
    report = found.pop("report")
    first = found["0-0"]
    weights, steps = plain(folder, ranks)
    assert sorted(itertools.chain(*steps.values())) == sorted([*range(SAMPLES)] * epochs), report
    assert first["samples"] == SAMPLES * epochs
    assert first["weights"]["times"].tolist() == [epochs] * SAMPLES
    torch.testing.assert_close(first["sums"].sum(), torch.tensor(float(len(steps)), dtype=torch.float64))
    for name in ("layer.weight", "layer.bias"):
        torch.testing.assert_close(first["weights"][name], weights[name], rtol=0, atol=1e-6)
    if main is None:
        main = min(int(name.split("-")[0]) for name in found if int(name.split("-")[0]) not in lives)
    for name, other in found.items():
        number, rank = map(int, name.split("-"))
        assert other["life"] == lives.get(number, 0), report
        assert other["main"] == (number == main and rank == 0)
        assert other["step"] == first["step"]
        assert other["schedule"] == first["schedule"]
        if rank == 0:
            assert all(torch.equal(each, other["weights"][key]) for key, each in first["weights"].items())
            assert other["scale"] == first["scale"]
            assert torch.equal(first["sums"], other["sums"])
            assert torch.equal(first["random"], other["random"])
