"""What a meter of training steps costs, and its numbers compared with a clock, FlopCounterMode and the profiler.

    python benchmarks/meter.py

The cost is the median of paired differences of a step with and without a meter, as in `step`, with a batch of a loader.
The other figures are of a small network of blocks: FLOPs compared with torch's FlopCounterMode on the bare model, the
sum of the parts and of evaluation with a clock around the loop, and the utilization with the one that these give by
hand. Two ranks with FSDP2 compare one step with torch's profiler. Accelerate 1.15.0 is no column: it has no meter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from accel import Accelerator, FullyShardedDataParallelPlugin, MeterKwargs

WIDTH, LAYERS, ROWS, STEPS, PAIRS = 256, 4, 64, 60, 4000
PEAK = 1e11  # of no device: what a share of it is can be computed by hand


class Block(nn.Module):
    """Two layers, which may be computed again for backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers, self.again = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), again

    def forward(self, values: Tensor) -> Any:
        """Add something."""
        return values + (checkpoint(self.layers, values, use_reentrant=False) if self.again else self.layers(values))


def net(again: bool = False) -> nn.Module:
    """Return blocks."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(again) for _ in range(LAYERS)))


def counted() -> float:
    """Return what torch counts for a sample, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        net()(torch.rand(ROWS, WIDTH)).sum().backward()
    return counter.get_total_flops() / ROWS


def small(metered: bool) -> Iterator[None]:
    """Make a step of a small layer each time it is asked."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MeterKwargs()] if metered else [])
    layer: Any = nn.Linear(4, 4)
    optimizer, loader = torch.optim.SGD(layer.parameters(), lr=1e-3), DataLoader(torch.rand(4 * PAIRS, 4), batch_size=2)
    layer, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(layer):
            accelerator.backward(layer(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        yield


def cost() -> float:
    """Return what a meter adds to a step, in seconds."""
    plain = small(metered=False)
    next(plain)  # its loader is read from before there is a meter
    metered, added = small(metered=True), []
    for _ in range(PAIRS):
        begun = time.perf_counter()
        next(plain)
        between = time.perf_counter()
        next(metered)
        added.append(time.perf_counter() - between - (between - begun))
    return statistics.median(added)


def numbers(window: int, evaluates: bool, again: bool) -> str:
    """Return a row: the meter's numbers divided by those by hand."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=window,
        kwargs_handlers=[MeterKwargs(every=STEPS, peak_flops=PEAK)],
    )
    model: Any = net(again)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader([torch.rand(WIDTH)] * ROWS * 4, ROWS)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, DataLoader(loader.dataset, ROWS))
    begun, outside, batches = 0.0, 0.0, 0
    while accelerator.meter.last is None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                now = time.perf_counter()
                optimizer.zero_grad()
            batches += 1
            if batches == window:  # the first step is not measured
                begun, outside = now, 0.0
            if accelerator.meter.last is not None:
                break
            if evaluates and accelerator.sync_gradients:
                start = time.perf_counter()
                with torch.no_grad():
                    for rows in test:
                        model(rows)
                outside += time.perf_counter() - start
    found = accelerator.meter.last
    parts = [found.waiting, found.forward, found.backward, found.exchange, found.optimizer, found.saving, found.rest]
    wall, flops = now - begun, counted() * ROWS * window
    share = flops * found.steps / (wall - outside) / PEAK
    name = f"accumulation {window}{', evaluation between' * evaluates}{', recomputation' * again}"
    return (
        f"| {name} | {found.flops / flops:.3f} | {(sum(parts) + found.evaluation) * found.steps / wall:.3f} | "
        f"{found.mfu / share:.3f} | {found.samples_per_second:,.0f} |"
    )


def shards() -> None:
    """Print rows of one step on two ranks with FSDP2, compared with the profiler."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[MeterKwargs(every=1)])
    model: Any = net()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader([torch.rand(WIDTH)] * ROWS * 8, ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number, batch in enumerate(loader):
            last = f" {number}" if number == len(loader) - 1 else ""
            with torch.profiler.record_function(f"forward{last}"):
                loss = model(batch)
            with torch.profiler.record_function(f"backward{last}"):
                accelerator.backward(loss.sum())
            with torch.profiler.record_function(f"optimizer{last}"):
                optimizer.step()
    found, mine = accelerator.meter.last, {event.name: event.cpu_time_total / 1e6 for event in profiler.events()}
    seconds = torch.tensor([mine[f"{name} {number}"] for name in ("forward", "backward", "optimizer")])
    forward, backward, optimized = accelerator.reduce(seconds, "mean").tolist()
    if accelerator.is_main_process:
        flops = found.flops / (2 * ROWS * counted())
        print(f"| FSDP2: FLOPs ÷ FlopCounterMode | {flops:.3f} | 1.000 |")
        print(f"| FSDP2, profiled step: forward ÷ profiler | {found.forward / forward:.3f} | 1 ± 0.01 |")
        print(f"| … backward and exchange ÷ profiler | {(found.backward + found.exchange) / backward:.3f} | 1 ± 0.01 |")
        print(f"| … forward, backward and optimizer, ms | {1e3 * (forward + backward + optimized):.1f} | |")
    accelerator.end_training()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no meter")
    parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        shards()
        return
    rows = [
        numbers(window, evaluates, again)
        for window, evaluates, again in (
            (1, False, False),
            (4, False, False),
            (1, True, False),
            (4, True, False),
            (1, False, True),
            (4, True, True),
        )
    ]
    print("| one process | FLOPs ÷ FlopCounterMode | parts and evaluation ÷ clock | MFU ÷ by hand | samples/s |")
    print("|---|---|---|---|---|\n" + "\n".join(rows))
    print("| target | 1.000 | 1 ± 0.01 | 1 ± 0.01 | |\n")
    print(f"| | figure | target |\n|---|---|---|\n| added to a step, µs | {1e6 * cost():.1f} | ≤ 5 |", flush=True)
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    subprocess.run(launch, env=own, check=True)


if __name__ == "__main__":
    main()
