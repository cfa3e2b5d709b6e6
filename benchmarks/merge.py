"""Whole weights out of shards, beside copying the same bytes.

    python benchmarks/merge.py [--gib 1] [--largest 64] [--rounds 6] [--directory FOLDER]

A model of `--gib` GiB in matrices of `--largest` MiB lies in shards as two ranks write them with torch's distributed
checkpoints. `merge_weights` and copying the files, flushed to disk, take turns; shown are the medians, and that of the
paired ratios. Memory is what a process grows by that merges for the first time. Accelerate 1.15.0 is no column: it
holds all weights in memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROWS = 1024


def write(rank: int, folder: str, store: str, count: int, columns: int) -> None:
    """Write the shards of one of two ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors = {f"layers.{number}.weight": torch.randn(ROWS, columns) for number in range(count)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    dcp.save({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


def copy(source: Path, target: Path) -> None:
    """Copy the files of a folder and flush them to disk."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with open(target / file.name, "rb") as opened:
            os.fsync(opened.fileno())


def timed(call: Callable[[Path, Path], object], source: Path, target: Path) -> float:
    """Return the seconds of a call that writes a folder, with nothing waiting for the disk beforehand."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    call(source, target)
    return time.perf_counter() - begin


def growth(source: Path, target: Path) -> float:
    """Return by how many MiB a process grows that merges for the first time."""
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom accel_parallel.checkpoint.merge import merge_weights\n"
        "import torch\ntorch.ones(1).sum()\npeak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\nmerge_weights(Path(sys.argv[1]), Path(sys.argv[2]))\nprint((peak() - before) / 1024)"
    )
    said = subprocess.run([sys.executable, "-c", script, source, target], check=True, capture_output=True, text=True)
    return float(said.stdout)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--largest", type=int, default=64, help="MiB of one tensor")
    parser.add_argument("--rounds", type=int, default=6, help="paired measurements, an even number")
    parser.add_argument("--directory", default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--peer", help="not used: see above")
    args = parser.parse_args()

    import torch.multiprocessing as multiprocessing

    from accel_parallel.checkpoint.merge import merge_weights

    count, columns = round(args.gib * 1024 / args.largest), args.largest * 2**20 // ROWS // 4
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        source, target = Path(place) / "pytorch_model_fsdp_0", Path(place) / "out"
        multiprocessing.spawn(write, (str(source), f"{place}/store", count, columns), nprocs=2)
        grown = growth(source, target)
        merged: list[float] = []
        copied: list[float] = []
        for number in range(args.rounds):
            turns = [(merge_weights, merged), (copy, copied)]
            for call, found in turns if number % 2 else reversed(turns):
                found.append(timed(call, source, target))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(merged, copied, strict=True))
    ours, theirs = statistics.median(merged), statistics.median(copied)
    print(f"| {args.gib:g} GiB in tensors of {args.largest} MiB, median of {args.rounds} | accel | copy | target |")
    print("|---|---|---|---|")
    print(f"| merge, files flushed, s | {ours:.2f} ({ratio:.2f} ×) | {theirs:.2f} | ≤ 1.2 × |")
    print(f"| growth of memory, MiB | {grown:.0f} |  | ≤ 256 + the largest tensor |")


if __name__ == "__main__":
    main()
