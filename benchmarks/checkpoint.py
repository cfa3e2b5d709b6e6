"""Saving and loading the state of a run, beside torch.save and plain reads of the same bytes.

    python benchmarks/checkpoint.py [--gib 0.5] [--rounds 8] [--directory FOLDER] [--peer PYTHON]

A model of `--gib` GiB and its AdamW state (three times as much together). `save_state` and `torch.save` of the same
tensors take turns, each after a sync and each flushed to disk; the first of two rounds begins with the one, the second
with the other, because a disk that was written to is slower for a while, and shown is the ratio of the medians. Before
each, a file of as many bytes is written and deleted, so that neither waits for memory of the machine's host. Every
`save_state` replaces a checkpoint, and frees what it replaced; every `torch.save` writes a new file. A save in the
background shows the time for which training stands still, with buffers that are used again. `load_state` takes turns
with reading the same bytes into fresh memory; its peak is the growth of resident memory over what is restored, in a
process that restores for the first time. With --peer, accelerate 1.15.0 does the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH = 2048
PIECE = 16 << 20


def build(accelerator: Any, gib: float) -> tuple[Any, Any]:
    """Prepare a model of so many GiB, and an optimizer whose state is filled."""
    import torch

    torch.manual_seed(0)
    count = max(1, round(gib * 2**30 / (WIDTH * WIDTH * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.prepare(model, optimizer)


def flush(path: Path) -> None:
    """Flush a file, or every file of a folder, to disk."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def warm(nbytes: int, cache: Path | None) -> None:
    """Fill and free memory, or the cache of files, because a virtual machine's host is slow to give what was free."""
    if cache is None:
        import torch

        torch.ones(nbytes, dtype=torch.uint8)
        return
    zeros = memoryview(bytearray(PIECE))
    with open(cache, "wb", buffering=0) as file:
        for _ in range(-(-nbytes // PIECE)):
            file.write(zeros)
    cache.unlink()


def timed(call: Any, nbytes: int, cache: Path | None = None) -> float:
    """Return the seconds of a call that fills so much memory, or so much of the cache of files where one is passed."""
    os.sync()  # nothing waits for the disk beforehand
    warm(nbytes, cache)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_fresh(folder: Path) -> None:
    """Read all bytes of a folder into memory that was never touched."""
    import torch

    for file in sorted(folder.iterdir()):
        target = torch.empty(max(1, file.stat().st_size), dtype=torch.uint8)
        with open(file, "rb", buffering=0) as opened:
            opened.readinto(target.numpy())


def resident(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1])


def work(library: str, gib: float, rounds: int, directory: Path) -> dict[str, float]:
    """Measure one library."""
    import torch

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model, optimizer = build(accelerator, gib)
    nbytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
    folder, single = directory / "ckpt", directory / "single.pt"

    def save_state() -> None:
        accelerator.save_state(str(folder))
        if library != "accel":
            flush(folder)

    def save_plain() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, single)
        flush(single)

    save_state(), save_plain()
    times: dict[Any, list[float]] = {save_state: [], save_plain: []}
    for number in range(rounds):
        for save in (save_state, save_plain) if number % 2 else (save_plain, save_state):
            times[save].append(timed(save, nbytes, directory / "warm"))
        single.unlink()
    seconds = {save: statistics.median(taken) for save, taken in times.items()}
    print(f"{library}: seconds of save_state and torch.save: {[*times.values()]}", file=sys.stderr)
    result = {"save": seconds[save_state] / seconds[save_plain], "save_seconds": seconds[save_state]}
    if library == "accel":
        stalls = []
        for _ in range(4):
            handles: list[Any] = []
            save = lambda: handles.append(accelerator.save_state(str(folder), blocking=False))  # noqa: B023, E731
            stalls.append(timed(save, nbytes, directory / "warm"))
            handles[0].wait()
        result["stall"] = statistics.median(stalls[1:]) / seconds[save_state]
        result["stall_seconds"] = statistics.median(stalls[1:])
    loads, reads = [], []
    for _ in range(rounds):
        reads.append(timed(lambda: read_fresh(folder), nbytes))
        loads.append(timed(lambda: accelerator.load_state(str(folder)), nbytes))
    result["load"] = statistics.median(load / read for load, read in zip(loads, reads, strict=True))
    result["load_seconds"] = statistics.median(loads)
    return result


def peak(library: str, gib: float, directory: Path) -> dict[str, float]:
    """Load into a fresh process; return the time, and the growth of memory over the bytes of the optimizer's state."""
    import torch

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    count = max(1, round(gib * 2**30 / (WIDTH * WIDTH * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    state = 2 * sum(parameter.nbytes for parameter in model.parameters())
    reading = statistics.median(timed(lambda: read_fresh(directory / "ckpt"), 2 * state) for _ in range(3))
    before = 0

    def load() -> None:
        nonlocal before
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        accelerator.load_state(str(directory / "ckpt"))

    seconds = timed(load, 2 * state)
    grown = resident("VmHWM") - before
    return {
        "first_load": seconds / reading,
        "peak_over_state_mib": (grown - state) / 2**20,
        "largest_mib": WIDTH * WIDTH * 4 / 2**20,
    }


def measure(python: str, library: str, gib: float, rounds: int, directory: Path) -> dict[str, float]:
    """Measure a library in processes of its own."""
    found: dict[str, float] = {}
    for task in ("work", "peak"):
        command = [python, __file__, "--task", task, "--library", library, "--gib", str(gib), "--rounds", str(rounds)]
        done = subprocess.run([*command, "--directory", str(directory)], capture_output=True, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr)
        if done.returncode:
            raise SystemExit(done.returncode)
        found |= json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(directory / "ckpt")
    return found


def filesystem(folder: Path) -> str:
    """Return type and device of the filesystem that a folder lies on, as the system names them."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    own = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind = max(own, key=lambda mount: len(mount[1]))
    backing = Path("/sys/block", Path(device).name, "loop", "backing_file")
    below = f", a file on {filesystem(Path(backing.read_text().strip()))}" if backing.exists() else ""
    return f"{kind} on {device}{below}"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the model in GiB; takes minutes on a slow disk")
    parser.add_argument("--rounds", type=int, default=8, help="paired measurements, an even number")
    parser.add_argument("--directory", default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--peer", default=None, help="a Python that has accelerate 1.15.0")
    parser.add_argument("--task", choices=["work", "peak"], help=argparse.SUPPRESS)
    parser.add_argument("--library", default="accel", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        directory = Path(options.directory)
        if options.task == "work":
            print(json.dumps(work(options.library, options.gib, options.rounds, directory)))
        else:
            print(json.dumps(peak(options.library, options.gib, directory)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        where = filesystem(Path(folder))
        columns = {"accel": measure(sys.executable, "accel", options.gib, options.rounds, Path(folder))}
        if options.peer:
            columns["accelerate"] = measure(options.peer, "accelerate", options.gib, options.rounds, Path(folder))
    rows = {
        "save": "save_state / torch.save of the same tensors, both flushed",
        "save_seconds": "save_state, s",
        "stall": "standstill of a background save / blocking save",
        "stall_seconds": "standstill of a background save, s",
        "first_load": "load_state in a new process / reading the bytes into fresh memory",
        "load": "load_state in the process that saved / the same",
        "load_seconds": "load_state, s",
        "peak_over_state_mib": "peak memory of load_state over the state, MiB",
        "largest_mib": "largest tensor, MiB",
    }
    print(f"| {options.gib} GiB model + AdamW, median of {options.rounds}, {where} | {' | '.join(columns)} | target |")
    print(f"|---|{'---|' * len(columns)}---|")
    reach = {"save": "≤ 1.15", "stall": "≤ 0.25", "first_load": "≤ 1.5", "load": "≤ 1.5"}
    reach["peak_over_state_mib"] = "≤ the largest tensor"
    for key, words in rows.items():
        cells = [f"{found[key]:.2f}" if key in found else "–" for found in columns.values()]
        print(f"| {words} | {' | '.join(cells)} | {reach.get(key, '')} |")


if __name__ == "__main__":
    main()
