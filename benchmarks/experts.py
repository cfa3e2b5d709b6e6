"""Expert parallel on two gloo ranks, beside a dispatch written by hand with torch's all_to_all and grouped_mm.

    python benchmarks/experts.py

Steps (forward, backward, optimizer) of both take turns, with the same weights, so that tokens go the same ways; shown
is the median of paired ratios. Bytes: what leaves a rank in a step, beside what the rows of tokens have whose expert is
on the other rank, there and back, forward and backward. Accelerate 1.15.0 is no column: it has no axis for experts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single

from accel import Accelerator, ParallelismConfig, PartialState

WIDTH, INNER, COUNT, CHOICES, TOKENS, ROUNDS = 256, 512, 8, 2, 2048, 60


class Experts(nn.Module):
    """Experts whose products are grouped."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH) / INNER**0.5)

    def sorted(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return what experts make of rows in the order of their numbers."""
        ends = torch.bincount(numbers, minlength=self.num_experts).cumsum(0).to(torch.int32)
        return nn.functional.grouped_mm(nn.functional.grouped_mm(rows, self.up, offs=ends).relu(), self.down, offs=ends)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        choices = numbers.shape[1]
        order = numbers.flatten().argsort(stable=True)
        made = self.sorted(tokens[order // choices], numbers.flatten()[order])[order.argsort()]
        return (made * weights.reshape(-1, 1)).view(len(tokens), choices, -1).sum(1)


class Net(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, COUNT), experts

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the square of what the experts make of tokens."""
        weights, numbers = self.router(tokens).softmax(-1).topk(CHOICES)
        return self.experts(tokens, numbers, weights).square().mean()


class Written(Experts):
    """A dispatch as one writes it for this model alone."""

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, and what comes back to its tokens."""
        ranks, wanted = dist.get_world_size(), numbers.flatten()
        order = wanted.argsort(stable=True)
        counts = torch.bincount(wanted, minlength=COUNT)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        leaving, coming = (each.view(ranks, -1).sum(1).tolist() for each in (counts, arriving))
        rows = all_to_all_single(tokens.new_empty(sum(coming), WIDTH), tokens[order // CHOICES], coming, leaving)
        held = torch.arange(self.num_experts).repeat(ranks).repeat_interleave(arriving)
        place = held.argsort(stable=True)
        made = self.sorted(rows[place], held[place])[place.argsort()]
        back = all_to_all_single(tokens.new_empty(len(order), WIDTH), made, leaving, coming)[order.argsort()]
        return (back * weights.reshape(-1, 1)).view(len(tokens), CHOICES, -1).sum(1)


def measure() -> None:
    """Measure both in turns, on one of two ranks; the first prints the table."""
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(ep_size=PartialState(cpu=True).num_processes)
    )
    torch.manual_seed(0)
    ours: Any = Net(Experts(COUNT))
    theirs = Net(Written(COUNT // accelerator.num_processes))
    theirs.router.load_state_dict(ours.router.state_dict())  # tokens go the same ways in both
    for own, whole in zip(theirs.experts.parameters(), ours.experts.parameters(), strict=True):
        own.data = whole.detach().chunk(accelerator.num_processes)[accelerator.process_index].clone()
    tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(accelerator.process_index))
    tokens.requires_grad_()  # as behind other layers, whose gradients travel too
    total = sum(each.nbytes for each in ours.experts.parameters())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    ours, optimizer = accelerator.prepare(ours, optimizer)
    other = torch.optim.SGD(theirs.parameters(), lr=0.01)

    def step_ours() -> None:
        accelerator.backward(ours(tokens))
        optimizer.step()
        optimizer.zero_grad()

    def step_theirs() -> None:
        theirs(tokens).backward()
        for parameter in theirs.router.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= accelerator.num_processes
        for parameter in theirs.experts.parameters():
            parameter.grad /= accelerator.num_processes
        other.step()
        other.zero_grad()

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for step, own in zip((step_theirs, step_ours), times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step()
            own.append(time.perf_counter() - start)
    sent, needed = bytes_of(step_ours, ours, tokens)
    held = sum(each.to_local().nbytes for each in ours.experts.parameters())
    if accelerator.is_main_process:
        ratio = statistics.median(hand / own for hand, own in zip(*times, strict=True))
        hand, own = (statistics.median(each) * 1e3 for each in times)
        print("| two gloo ranks | ratio | accel, ms | by hand, ms | target |\n|---|---|---|---|---|")
        print(f"| steps/s ÷ by hand | {ratio:.3f} | {own:.2f} | {hand:.2f} | ≥ 0.95 |")
        print(f"| bytes exchanged ÷ rows of tokens that leave | {sent / needed:.4f} | | | ≤ 1.05 |")
        print(f"| bytes of experts on a rank ÷ all | {held / total:.3f} | | | 0.5 |")
    accelerator.end_training()


def bytes_of(step: Any, net: Any, tokens: Tensor) -> tuple[int, int]:
    """Return the bytes that leave this rank in a step, and those of the tokens that have to, four times."""
    sent, right, rank = 0, dist.all_to_all_single, dist.get_rank()

    def counted(output: Tensor, given: Tensor, into: Any = None, out: Any = None, group: Any = None, **how: Any) -> Any:
        nonlocal sent
        sizes = out or [len(given) // group.size()] * group.size()
        sent += sum(size for place, size in enumerate(sizes) if place != rank) * given[0].nbytes if len(given) else 0
        return right(output, given, into, out, group=group, **how)

    with torch.no_grad():
        numbers = net.router(tokens).topk(CHOICES).indices
    own = COUNT // dist.get_world_size()
    leaving = torch.tensor(int((numbers // own != rank).sum()))
    total = leaving.clone()
    dist.all_reduce(total)
    with patch.object(dist, "all_to_all_single", counted):
        step()
    # Out and back, forward and backward: outputs and gradients of inputs leave from where the experts are.
    return sent, (2 * int(leaving) + 2 * (int(total) - int(leaving))) * WIDTH * 4


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no axis for experts")
    parser.parse_args()
    if "RANK" in os.environ:
        measure()
        return
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    subprocess.run(launch, env=own, check=True)


if __name__ == "__main__":
    main()
