"""Expert parallel on two ranks, compared with a dispatch written by hand with torch's all_to_all and grouped_mm.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/experts.py

Prints the share of the experts' bytes that a rank holds, the steps in a second of both (in turns, medians), and the
bytes that leave a rank in a step over those that tokens for another rank's experts have.
"""

from __future__ import annotations

import statistics
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


def main() -> None:
    """Measure both in turns."""
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

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(ROUNDS):
        for name, step in (("ours", step_ours), ("theirs", step_theirs)):
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(1 / (time.perf_counter() - start))
    sent, needed = bytes_of(step_ours, ours, tokens)
    held = sum(each.to_local().nbytes for each in ours.experts.parameters())
    if accelerator.is_main_process:
        speeds = {name: statistics.median(each) for name, each in times.items()}
        print(f"expert bytes on a rank / all                 {held / total:.3f}")
        print(f"steps/s, ours / by hand                      {speeds['ours'] / speeds['theirs']:.3f}")
        print(f"bytes exchanged / those of tokens that leave {sent / needed:.4f}")
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


if __name__ == "__main__":
    main()
