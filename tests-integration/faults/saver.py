"""A rank that saves again and again; run by the fault tests in a forked process, with SETTINGS as a global.

Every number in its state is the count of the save, so that a mixture of two saves shows. The phase of the save that the
rank is in stands on a board, a small file that survives the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_core.checkpoint import commit
from accel_core.checkpoint.format import FilePart
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.comm.control import Channel
from accel_core.mesh.tensor import local_part
from accel_core.process import world
from accel_parallel.checkpoint.writer import ShardPart
from accel_parallel.sharding.format import FullyShardedFormat

SETTINGS: dict[str, Any] = globals().get("SETTINGS", {})
WIDTH = 16
CHANGING_CALLS = ("open", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "write", "chmod")


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


class Shards:
    """What checkpoints ask of a strategy, for models in shards."""

    format = FullyShardedFormat("SHARDED_STATE_DICT", lambda optimizer, keep: {})

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return nothing: shards are not gathered."""
        return {}


def saved(directory: str | Path, automatic: bool) -> Path | None:
    """Return the folder of the latest complete save in a directory."""
    series = reversed(commit.numbered(Path(directory, "checkpoints"))) if automatic else [Path(directory, "ckpt")]
    return next((folder for folder in map(commit.find, series) if folder is not None), None)


def build() -> BareRun:
    """Return a run whose whole state is zero."""
    model = nn.Linear(64, 64)
    if SETTINGS.get("sharded"):
        fully_shard(model, mesh=init_device_mesh("cpu", (SETTINGS["size"],)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = BareRun([model], [optimizer], custom_objects=[Count()])
    if SETTINGS.get("sharded"):
        run.strategy = Shards()
    return run


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
        counts |= {float(value) for value in local_part(parameter.detach()).unique()}
        momentum = local_part(run.optimizers[0].state[parameter]["momentum_buffer"])
        counts |= {float(value) for value in momentum.unique()}
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
    wrap(commit, "stage", "make room")
    wrap(FilePart, "write", "write")
    wrap(ShardPart, "write", "write")
    wrap(ShardPart, "conclude", "list")
    wrap(Channel, "exchange", "agree")
    wrap(Channel, "total", "sum")
    wrap(Manifest, "write", "manifest")
    wrap(commit, "_flush_tree", "flush")
    wrap(commit, "publish", "commit")
    wrap(commit, "_place", "place")
    wrap(commit, "prune", "prune")


def die_after(calls: int) -> None:
    """Kill this process after so many system calls from now on."""
    left = [calls]

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, wrapped)

    # A kill takes nothing from the system's memory, so nothing has to wait for the disk here.
    os.fsync = lambda descriptor: None
    for name in CHANGING_CALLS:
        wrap(os, name)


def save_and_die(run: BareRun, target: str, count: int, calls: int) -> int:
    """Save in a process of its own that dies after so many system calls; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fill(run, count)
            die_after(calls)
            save_state(run, target)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_every_call(run: BareRun, target: str) -> None:
    """Save and die after every `stride`-th system call, and in some of the saves that recover; load after each."""

    def on_disk() -> int:
        if saved(SETTINGS["directory"], SETTINGS["automatic"]) is None:
            return 0
        load_state(run, None if SETTINGS["automatic"] else target)
        return count_of(run)

    code, calls, before, stride = -signal.SIGKILL, 0, on_disk(), SETTINGS["stride"]
    while code:
        calls += stride
        for deadly in (calls, random.randrange(1, 20))[: 1 + (calls // stride % 3 == 0)]:
            if SETTINGS.get("fresh") and deadly == calls:
                for name in os.listdir(SETTINGS["directory"]):
                    if "ckpt" in name:
                        shutil.rmtree(os.path.join(SETTINGS["directory"], name))
                before = 0
            code = save_and_die(run, target, before + 1, deadly)
            found = on_disk()
            assert found in (before, before + 1), f"{deadly} calls: {before} was there, and {found} was loaded"
            assert code in (0, -signal.SIGKILL)
            assert code or found == before + 1
            before = found
            if code == 0:
                break
    with open(SETTINGS["log"], "a") as log:
        log.write(f"{calls}\n")


def no_links(*args: Any, **kwargs: Any) -> None:
    """Be a filesystem that has no hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


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
    if SETTINGS.get("plain"):
        os.link = no_links
    world.ensure(cpu=True, timeout=timedelta(seconds=SETTINGS.get("timeout", 60)))
    run = build()
    run.project.project_dir = SETTINGS["directory"]
    run.project.automatic_checkpoint_naming = SETTINGS["automatic"]
    run.project.total_limit = 2
    target = os.path.join(SETTINGS["directory"], "ckpt")
    if SETTINGS.get("every_call"):
        die_at_every_call(run, target)
        return
    there = saved(SETTINGS["directory"], SETTINGS["automatic"])
    if there is not None:
        load_state(run, None if SETTINGS["automatic"] else target)
    begin = 1 + (count_of(run) if there is not None else 0)
    with open(SETTINGS["board"], "r+b") as file, mmap.mmap(file.fileno(), 0) as board:
        if SETTINGS.get("pause") is not None:
            watch_phases(board, rank, SETTINGS["pause"])
        for count in range(begin, begin + SETTINGS["saves"]):
            fill(run, count)
            save_state(run, target)
            if rank == 0:
                with open(SETTINGS["log"], "a") as log:
                    log.write(f"{count}\n")


if __name__ == "saver":
    main()
