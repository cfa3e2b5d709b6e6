"""What a batch of a prepared loader costs more than the same batch of the plain loader.

    python benchmarks/loader.py [--peer PYTHON] [--batches N]

One process on a CPU, batches of four samples of a tensor dataset, no workers. The plain loader and the prepared one
give a batch in turns; shown is the median of the paired differences, in microseconds. Resuming is the time from a
position at 90 % of a shuffled epoch of 200,000 samples to the first batch: accel's cursor, and the peer's
skip_first_batches. Skipping is the time to the first batch after skip_first_batches leaves out 4,900 of 5,000
batches in order. With --peer, that Python does the same with accelerate 1.15.0, in turns with ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import chain

from side_by_side import Worker

ROUNDS = 6
LONG, SHORT = 200_000, 5_000


def work(library: str, batches: int) -> None:
    """Measure whenever a line comes in."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(4 * batches, 8), torch.zeros(4 * batches))
    plain = DataLoader(data, batch_size=4)
    prepared = accelerator.prepare(DataLoader(data, batch_size=4))
    long = accelerator.prepare(DataLoader(range(LONG), batch_size=4, shuffle=True))
    short = accelerator.prepare(DataLoader(range(4 * SHORT), batch_size=4))
    position = None
    if library == "accel":
        for _ in long:
            position = long.cursor.state_dict()
            break
        position["offset"] = LONG // 10 * 9

    def resume():
        begun = time.perf_counter()
        if library == "accel":
            long.cursor.load_state_dict(position)
            next(iter(long))
        else:
            next(iter(accelerator.skip_first_batches(long, LONG // 40 * 9)))
        return time.perf_counter() - begun

    def skip():
        begun = time.perf_counter()
        next(iter(accelerator.skip_first_batches(short, SHORT - 100)))
        return time.perf_counter() - begun

    print("ready", flush=True)
    for _ in sys.stdin:
        base, added = [], []
        left, right = iter(plain), iter(prepared)
        next(left), next(right)
        for _ in range(batches - 2):
            begun = time.perf_counter()
            next(left)
            between = time.perf_counter()
            next(right)
            done = time.perf_counter()
            base.append(between - begun)
            added.append((done - between) - (between - begun))
        skipped = skip()  # before the long order comes and goes, whose memory is given back
        print(json.dumps([base, added, resume(), skipped]), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--batches", type=int, default=3000, help="batches in a turn")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.batches)
        return
    more = ("--batches", str(args.batches))
    workers = {"accel": Worker(sys.executable, __file__, "--work", "accel", *more)}
    if args.peer:
        workers["accelerate 1.15.0"] = Worker(args.peer, __file__, "--work", "accelerate", *more)
    for _ in range(ROUNDS):
        for worker in workers.values():
            worker.measure()
    columns = "plain batch, µs | added per batch, µs | target | resume at 90 % of 200,000 samples, ms"
    print(f"| library | {columns} | skip 4,900 of 5,000 batches, ms |")
    print("|---|---|---|---|---|---|")
    for name, worker in workers.items():
        worker.end()
        reach = "≤ 2" if name == "accel" else ""
        *columns, resumes, skips = zip(*worker.turns, strict=True)
        base, added = (statistics.median(chain.from_iterable(column)) * 1e6 for column in columns)
        resume, skip = (statistics.median(times) * 1e3 for times in (resumes, skips))
        print(f"| {name} | {base:.1f} | {added:.2f} | {reach} | {resume:.1f} | {skip:.2f} |")


if __name__ == "__main__":
    main()
