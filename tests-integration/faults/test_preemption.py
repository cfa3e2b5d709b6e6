"""A run that is asked to end saves, leaves with a code of its own, and goes on when it is started again."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from accel_core.checkpoint.manifest import is_complete
from accel_core.checkpoint.preemption import EXIT_CODE

SCRIPT = str(Path(__file__).with_name("preempted.py"))
RANKS = 2


def start(directory: Path, pause: float) -> list[BaseProcess]:
    """Start the ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accel_core.testing._preload", "torch._dynamo"])
    (directory / "meeting").unlink(missing_ok=True)
    ranks = []
    for rank in range(RANKS):
        settings = {"rank": rank, "size": RANKS, "directory": str(directory), "pause": pause}
        settings["meeting"] = str(directory / "meeting")
        process = context.Process(
            target=runpy.run_path,
            args=(SCRIPT,),
            kwargs={"init_globals": {"SETTINGS": settings}, "run_name": "preempted"},
        )
        process.start()
        ranks.append(process)
    return ranks


def end(ranks: list[BaseProcess]) -> list[int | None]:
    """Wait for the ranks and return their exit codes."""
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_end_and_started_again(number: int, tmp_path: Path) -> None:
    """One rank gets the signal; all leave with 75 and a complete checkpoint; the end equals a run without it."""
    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    straight.mkdir()
    interrupted.mkdir()
    assert end(start(straight, 0.0)) == [0] * RANKS
    ranks = start(interrupted, 0.02)
    deadline = time.monotonic() + 60
    while not (interrupted / "at-1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, number)
    assert end(ranks) == [EXIT_CODE] * RANKS
    assert is_complete(interrupted / "ckpt")
    assert not (interrupted / "end-0.pt").exists()
    assert end(start(interrupted, 0.0)) == [0] * RANKS
    for rank in range(RANKS):
        one = torch.load(straight / f"end-{rank}.pt", weights_only=True)
        two = torch.load(interrupted / f"end-{rank}.pt", weights_only=True)
        assert torch.equal(one["weight"], two["weight"])
        assert torch.equal(one["next"], two["next"])
