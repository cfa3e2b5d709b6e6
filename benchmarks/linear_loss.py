"""Memory of a loss that has logits of some tokens at a time, where ranks share the rows of the head or FSDP2 shards it.

    python benchmarks/linear_loss.py

Each row is a forward and a backward pass of a head over hidden states that need a gradient, on gloo ranks: the most
memory that a rank had beyond what it had before, of the rank that had most, and how much of it has a name. With tensor
parallel that is the gradients of hidden states and of the rank's rows, and logits of a chunk for these rows. FSDP2
gathers the head as any block, so that its names are the whole head, its whole gradient, and logits of a chunk for all
words; what is left is torch's copies of both on the way. Accelerate 1.15.0 is no column: it has no such loss.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig

WORDS, WIDTH, TOKENS, CHUNK = 65536, 512, 1024, 256


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
    given: dict[str, Any] = (
        {"parallelism_config": ParallelismConfig(tp_size=ranks, tp_handler=plan)}
        if way == "tensor parallel"
        else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
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
    head, own = WORDS * WIDTH, WORDS if way == "FSDP2" else WORDS // ranks
    named = 4 * (TOKENS * WIDTH + CHUNK * own + (2 * head if way == "FSDP2" else head // ranks))
    target = "≤ 1.05" if way == "tensor parallel" else ""
    run.print(
        f"| {way}, {ranks} ranks | {most / 2**20:.0f} | {most / named:.2f} | {most / (4 * head):.2f} | {target} |",
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
    print("| a forward and a backward pass | peak, MiB | ÷ what has a name | ÷ the whole head | target |")
    print("|---|---|---|---|---|", flush=True)
    for way in ("tensor parallel", "FSDP2"):
        for ranks in (2, 4):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            subprocess.run([*launch, __file__, "--way", way], env=own, check=True)


if __name__ == "__main__":
    main()
