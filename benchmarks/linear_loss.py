"""Memory of a loss that has logits of some tokens at a time, where ranks share the rows of the head or FSDP2 shards it.

    python benchmarks/linear_loss.py

Each row is a forward and a backward pass of a head over hidden states that need a gradient, on gloo ranks: the most
memory that a rank had beyond what it had before, of the rank that had most, and how much of it has a name. With tensor
parallel that is the gradients of hidden states and of the rank's rows, and logits of a chunk for these rows; the same
where FSDP2 shards the head on its own, although slices of the head and of its gradient are there instead of some
logits. Else FSDP2 gathers the head with the rest of the model, so that its names are the whole head, its whole
gradient, and logits of a chunk for all words; what is left is torch's copies of both on the way. The time is the median
of some passes, of the slowest rank. Accelerate 1.15.0 is no column: it has no such loss.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig

WORDS, WIDTH, TOKENS, CHUNK, PASSES = 65536, 512, 1024, 256, 7
WAYS = ("tensor parallel", "FSDP2, the head on its own", "FSDP2")


class Head(nn.Module):
    """Computes the loss of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor, run: Accelerator) -> Tensor:
        """Return the loss."""
        return run.linear_cross_entropy(hidden, self.head, labels, chunk=CHUNK)


def memory(kind: str) -> int:
    """Return bytes of this process's memory, as Linux tells: now, or at its highest."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


def measure(way: str) -> None:
    """Measure on one of the ranks; the first prints a row."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # glibc keeps no freed block, which would count as used
    ranks = int(os.environ["WORLD_SIZE"])
    plan = TorchTensorParallelConfig(tp_plan={"head": "colwise_gather_output"})
    alone = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    own: dict[str, Any] = {"fsdp_version": 2, **(alone if way == WAYS[1] else {})}
    given: dict[str, Any] = (
        {"parallelism_config": ParallelismConfig(tp_size=ranks, tp_handler=plan)}
        if way == WAYS[0]
        else {"fsdp_plugin": FullyShardedDataParallelPlugin(**own)}
    )
    run = Accelerator(cpu=True, **given)
    model: Any = Head()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(0)  # ranks of tensor parallel read the same
    hidden, labels = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randint(WORDS, (TOKENS,))
    run.backward(model(hidden[:CHUNK], labels[:CHUNK], run))  # what libraries keep
    optimizer.zero_grad()
    hidden.grad = None
    run.wait_for_everyone()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run.backward(model(hidden, labels, run))
    most = int(run.gather(torch.tensor([memory("VmHWM") - before])).max())
    took = []
    for _ in range(PASSES):
        optimizer.zero_grad()
        run.wait_for_everyone()
        begun = time.perf_counter()
        run.backward(model(hidden, labels, run))
        took.append(float(run.gather(torch.tensor([time.perf_counter() - begun])).max()))
    head, gathers = WORDS * WIDTH, way == WAYS[2]
    shard, words = (2 * head, WORDS) if gathers else (head // ranks, WORDS // ranks)
    named = 4 * (TOKENS * WIDTH + CHUNK * words + shard)
    run.print(
        f"| {way}, {ranks} ranks | {most / 2**20:.0f} | {most / named:.2f} | {most / (4 * head):.2f} | "
        f"{'' if gathers else '≤ 1.05'} | {statistics.median(took):.2f} |",
        flush=True,
    )
    run.end_training()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no such loss")
    parser.add_argument("--way", help="what a rank measures")
    way = parser.parse_args().way
    if way:
        measure(way)
        return
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    print("| a forward and a backward pass | peak, MiB | ÷ what has a name | ÷ the whole head | target | time, s |")
    print("|---|---|---|---|---|---|", flush=True)
    for way in WAYS:
        for ranks in (2, 4):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            subprocess.run([*launch, __file__, "--way", way], env=own, check=True)


if __name__ == "__main__":
    main()
