"""An average of weights in FSDP2's shards on two ranks, compared with one fused lerp over the same bytes.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/ema.py

Prints the CPU time of an update over that of the lerp (in turns, medians), the collectives of an update, and the bytes
of the average over those of the shards that train.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from accel import Accelerator, FullyShardedDataParallelPlugin

WIDTH, LAYERS, ROUNDS, UPDATES = 1024, 24, 15, 5


def main() -> None:
    """Measure both in turns."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ema = accelerator.ema(model)
    parts = [each.to_local().detach() for each in model.parameters()]
    averages = [each.clone() for each in parts]

    def lerp() -> None:
        torch._foreach_lerp_(averages, parts, 1 - 0.999)

    def update() -> None:
        ema.update(optimizer.optimizer)

    times: dict[str, list[float]] = {"update": [], "lerp": []}
    for _ in range(ROUNDS):
        for name, work in (("update", update), ("lerp", lerp)):
            work()
            dist.barrier()
            start = time.process_time()  # other processes of a busy machine are not counted
            for _ in range(UPDATES):
                work()
            times[name].append((time.process_time() - start) / UPDATES)
    with CommDebugMode() as comm:
        update()
    if accelerator.is_main_process:
        medians = {name: statistics.median(each) for name, each in times.items()}
        held = sum(each.nbytes for each in ema.state.averages.values()) / sum(each.nbytes for each in parts)
        print(f"CPU time of an update / of one fused lerp    {medians['update'] / medians['lerp']:.3f}")
        print(f"collectives of an update                     {comm.get_total_counts()}")
        print(f"bytes of the average / of the shards         {held:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
