"""Replicas that die by SIGKILL and come back, with the real launcher and torchft over gloo."""

import importlib.util
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core.testing import limits

pytest.importorskip("torchft", reason="torchft is not installed")

PROGRAM = Path(__file__).parents[1] / "program.py"
SAMPLES = 61  # neither a multiple of the batch size, nor of the batches of two replicas


def launched(folder: Path, *words: str, ranks: int = 1, replicas: int = 2, epochs: int = 3) -> dict[str, Any]:
    """Run the program under replicas; return what each rank of each found."""
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "-n", ranks, "--replicas", replicas]
    command += [PROGRAM, folder, SAMPLES, epochs, *words]
    ended = limits.run([*map(str, command)], quiet=40)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {path.stem.removeprefix("found-"): torch.load(path) for path in sorted(folder.glob("found-*.pt"))}
    assert len(found) == ranks * replicas, ended.stderr
    found["report"] = ended.stderr
    return found


def plain(folder: Path, ranks: int) -> tuple[Any, dict[int, list[int]]]:
    """Make the steps that were made, each with the samples of all replicas, in one process without accel."""
    spec = importlib.util.spec_from_file_location("program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    steps: dict[int, list[int]] = defaultdict(list)
    moves: dict[int, int] = {}
    for line in (line for path in folder.glob("read-*") for line in path.read_text().splitlines()):
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


def check(found: dict[str, Any], folder: Path, epochs: int, lives: dict[int, int]) -> None:
    """Check that every sample was trained with once an epoch, and that all replicas end with one state."""
    found.pop("report")
    first = found["0-0"]
    weights, steps = plain(folder, sum(name.startswith("0-") for name in found))
    assert sorted(itertools.chain(*steps.values())) == sorted([*range(SAMPLES)] * epochs)
    assert first["samples"] == SAMPLES * epochs
    assert first["weights"]["times"].tolist() == [epochs] * SAMPLES
    torch.testing.assert_close(first["sums"].sum(), torch.tensor(float(len(steps)), dtype=torch.float64))
    for name in ("layer.weight", "layer.bias"):
        torch.testing.assert_close(first["weights"][name], weights[name], rtol=0, atol=1e-6)
    for name, other in found.items():
        number, rank = map(int, name.split("-"))
        assert other["life"] == lives.get(number, 0)
        assert other["main"] == (number == rank == 0)
        assert other["step"] == first["step"]
        assert other["schedule"] == first["schedule"]
        if rank == 0:
            assert all(torch.equal(each, other["weights"][key]) for key, each in first["weights"].items())
            assert torch.equal(first["sums"], other["sums"])
            assert torch.equal(first["random"], other["random"])


def test_no_sample_is_lost_or_repeated_where_a_replica_dies_twice(tmp_path: Path) -> None:
    """A replica dies before its gradients are exchanged and behind a step: the other one does not start again."""
    found = launched(tmp_path, "1:0:3:before,1:1:2:behind")
    report = found["report"]
    assert "replica 1 ended: killed by SIGKILL" in report
    assert "was made without 1; the others waited" in report
    assert found["0-0"]["lost"] > 0
    check(found, tmp_path, 3, {1: 2})


@pytest.mark.full("more axes at once")
@pytest.mark.parametrize("inside", ["ddp", "fsdp2"])
def test_replicas_of_several_ranks_end_equal(inside: str, tmp_path: Path) -> None:
    """A replica of two ranks, with whole models or shards, loses one of them, and comes back as a whole."""
    found = launched(tmp_path, "1:0:3:before", inside, ranks=2)
    check(found, tmp_path, 3, {1: 1})


@pytest.mark.full("another case of a grid")
def test_three_replicas_with_workers_of_which_the_first_dies(tmp_path: Path) -> None:
    """Batches that workers read ahead are read again by those that live; who prints is another one meanwhile."""
    found = launched(tmp_path, "0:0:2:before,2:0:4:behind", "workers", replicas=3)
    check(found, tmp_path, 3, {0: 1, 2: 1})
