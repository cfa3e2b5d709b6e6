"""What one training step costs more than the same step in plain PyTorch.

    python benchmarks/step.py [--peer PYTHON] [--steps N]

One process, a model of one small linear layer: forward, backward, clip, optimizer step, schedule step, zero_grad. The
plain step and the accelerated one (accumulate + backward + clip + step) take turns; shown is the median of the paired
differences, in microseconds. With --peer, that Python does the same with accelerate 1.15.0, in turns with ours.
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


def work(library: str, steps: int) -> None:
    """Measure whenever a line comes in."""
    import torch

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    torch.set_num_threads(1)

    def made():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    x = torch.randn(2, 4)
    model, optimizer, schedule = made()

    def plain():
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    our_model, our_optimizer, our_schedule = accelerator.prepare(*made())

    def accelerated():
        with accelerator.accumulate(our_model):
            accelerator.backward(our_model(x).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(our_model.parameters(), 1.0)
            our_optimizer.step()
            our_schedule.step()
            our_optimizer.zero_grad()

    for _ in range(200):
        plain()
        accelerated()
    print("ready", flush=True)
    for _ in sys.stdin:
        base, added = [], []
        for _ in range(steps):
            begun = time.perf_counter()
            plain()
            between = time.perf_counter()
            accelerated()
            done = time.perf_counter()
            base.append(between - begun)
            added.append((done - between) - (between - begun))
        print(json.dumps([base, added]), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--steps", type=int, default=500, help="steps in a turn")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.steps)
        return
    more = ("--steps", str(args.steps))
    workers = {"accel": Worker(sys.executable, __file__, "--work", "accel", *more)}
    if args.peer:
        workers["accelerate 1.15.0"] = Worker(args.peer, __file__, "--work", "accelerate", *more)
    for _ in range(ROUNDS):
        for worker in workers.values():
            worker.measure()
    print("| library | plain step, µs | added per step, µs | target |\n|---|---|---|---|")
    for name, worker in workers.items():
        worker.end()
        reach = "≤ 6" if name == "accel" else ""
        columns = zip(*worker.turns, strict=True)
        base, added = (statistics.median(chain.from_iterable(column)) * 1e6 for column in columns)
        print(f"| {name} | {base:.0f} | {added:.1f} | {reach} |")


if __name__ == "__main__":
    main()
