"""An average of weights in FSDP2's shards on two ranks, compared with one fused lerp over the same bytes.

    python benchmarks/ema.py

Updates and lerps take turns; shown are medians of their CPU time, because other processes of a busy machine are not
counted in it, the collectives of an update, and the bytes of the average. Accelerate 1.15.0 is no column: it has none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from accel import Accelerator, FullyShardedDataParallelPlugin

WIDTH, LAYERS, ROUNDS, UPDATES = 1024, 24, 15, 5


def measure() -> None:
    """Measure both in turns, on one of two ranks; the first prints the table."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ema = accelerator.ema(model)
    parts = [each.to_local().detach() for each in model.parameters()]
    averages = [each.clone() for each in parts]

    def lerp() -> None:
        torch._foreach_lerp_(averages, parts, 1 - 0.999)

    def follow() -> None:
        ema.update(optimizer.optimizer)

    times: dict[str, list[float]] = {"update": [], "lerp": []}
    for _ in range(ROUNDS):
        for name, work in (("update", follow), ("lerp", lerp)):
            work()
            dist.barrier()
            start = time.process_time()
            for _ in range(UPDATES):
                work()
            times[name].append((time.process_time() - start) / UPDATES)
    with CommDebugMode() as comm:
        follow()
    if accelerator.is_main_process:
        medians = {name: statistics.median(each) for name, each in times.items()}
        held = sum(each.nbytes for each in ema.state.averages.values()) / sum(each.nbytes for each in parts)
        own, fused = (medians[name] * 1e3 for name in ("update", "lerp"))
        ratio = f"{own / fused:.3f} | {own:.2f} | {fused:.2f}"
        print("| two gloo ranks | ratio | accel, ms | fused lerp, ms | target |\n|---|---|---|---|---|")
        print(f"| CPU time of an update ÷ of one fused lerp | {ratio} | ≤ 1.1 |")
        print(f"| collectives of an update | {comm.get_total_counts()} | | | 0 |")
        print(f"| bytes of the average ÷ of the shards | {held:.3f} | | | 1 |")
    accelerator.end_training()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no averages")
    parser.parse_args()
    if "RANK" in os.environ:
        measure()
        return
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    subprocess.run(launch, env=own, check=True)


if __name__ == "__main__":
    main()
