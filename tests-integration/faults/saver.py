"""A rank that saves again and again; run by the fault tests in a forked process, with SETTINGS as a global.

Every number in its state is the count of the save, so that a mixture of two saves shows. The phase of the save that the
rank is in stands on a board, a small file that survives the process.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core.checkpoint import commit, folder, redo, transaction
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.run import BareRun
from accel_core.process import world

SETTINGS: dict[str, Any] = globals().get("SETTINGS", {})
WIDTH = 16
COMMIT_CALLS = ("open", "close", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "scandir", "write")


class Count:
    """A registered object that holds the count."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a count."""
        self.count = state["count"]


def build() -> BareRun:
    """Return a run whose whole state is zero."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return BareRun([model], [optimizer], custom_objects=[Count()])


def fill(run: BareRun, count: int) -> None:
    """Set everything to `count`."""
    with torch.no_grad():
        for parameter in run.models[0].parameters():
            parameter.fill_(count)
            run.optimizers[0].state[parameter]["momentum_buffer"] = torch.full_like(parameter, count)
    run.custom_objects[0].count = run.step = count
    torch.manual_seed(count * 10 + run.world.rank)


def count_of(run: BareRun) -> int:
    """Return the count that everything of a run is set to.

    Raises:
        AssertionError: Parts of the state come from different saves.
    """
    counts: set[float] = {run.step, run.custom_objects[0].count}
    for parameter in run.models[0].parameters():
        counts |= {float(value) for value in parameter.detach().unique()}
        counts |= {float(value) for value in run.optimizers[0].state[parameter]["momentum_buffer"].unique()}
    assert len(counts) == 1, f"a mixture of saves: {counts}"
    return int(counts.pop())


def watch_phases(board: mmap.mmap, rank: int, pause: float) -> None:
    """Write the phase onto the board whenever one of the steps of a save begins, and wait a little in it."""
    stack = ["outside"]

    def show() -> None:
        board[rank * WIDTH : (rank + 1) * WIDTH] = stack[-1].encode().ljust(WIDTH)

    def wrap(owner: Any, name: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            stack.append(phase)
            show()
            time.sleep(random.random() * pause)
            try:
                return original(*args, **kwargs)
            finally:
                time.sleep(random.random() * pause)
                stack.pop()
                show()

        setattr(owner, name, wrapped)

    show()
    wrap(transaction, "_make_room", "make room")
    wrap(FilePart, "write", "write")
    wrap(Ranks, "exchange", "agree")
    wrap(commit, "take_over_foreign_files", "link foreign")
    wrap(Manifest, "write", "manifest")
    wrap(transaction, "flush_folder", "flush")
    wrap(commit, "put_in_place", "put in place")
    wrap(commit, "discard", "delete")
    wrap(commit, "prune", "prune")


def die_after(calls: int) -> None:
    """Kill this process after so many system calls of the commit, beginning with the manifest."""
    left = [calls]
    armed = [False]

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if armed[0]:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, wrapped)

    for name in COMMIT_CALLS:
        wrap(os, name)
    wrap(commit, "_exchange")
    complete = transaction.Transaction._complete

    def armed_complete(self: transaction.Transaction, entries: list[Any]) -> None:
        armed[0] = True
        complete(self, entries)
        armed[0] = False

    transaction.Transaction._complete = armed_complete  # type: ignore[method-assign]


def main() -> None:
    """Load what is there, then save with rising counts until killed or done."""
    rank, size = SETTINGS["rank"], SETTINGS["size"]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_RDV_FILE": SETTINGS["meeting"],
    }
    random.seed(SETTINGS["seed"] + rank)
    if SETTINGS.get("inside"):
        redo.is_needed = Path.is_dir
    world.ensure(cpu=True, timeout=timedelta(seconds=SETTINGS.get("timeout", 60)))
    run = build()
    run.project.project_dir = SETTINGS["directory"]
    run.project.automatic_checkpoint_naming = SETTINGS["automatic"]
    run.project.total_limit = 2
    target = os.path.join(SETTINGS["directory"], "ckpt")
    there = commit.latest(folder.checkpoints_folder(run)) if SETTINGS["automatic"] else commit.find(Path(target))
    if there is not None:
        folder.load_state(run, None if SETTINGS["automatic"] else target)
    begin = 1 + (count_of(run) if there is not None else 0)
    with open(SETTINGS["board"], "r+b") as file, mmap.mmap(file.fileno(), 0) as board:
        if SETTINGS.get("pause") is not None:
            watch_phases(board, rank, SETTINGS["pause"])
        if SETTINGS.get("die_after"):
            die_after(SETTINGS["die_after"])
        for count in range(begin, begin + SETTINGS["saves"]):
            fill(run, count)
            folder.save_state(run, target)
            if rank == 0:
                with open(SETTINGS["log"], "a") as log:
                    log.write(f"{count}\n")


if __name__ == "saver":
    main()
