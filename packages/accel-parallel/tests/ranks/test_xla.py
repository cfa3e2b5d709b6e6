"""Processes that torch_xla joins, with a stand-in for it on gloo: two ranks equal one process."""

import sys
from pathlib import Path

import torch

from accel_core.accelerator import Accelerator
from accel_core.comm.objects import gather_object
from accel_core.process.world import current
from accel_core.strategies.strategy import strategy_of
from accel_testing import world

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


def batch(rank: int, step: int) -> torch.Tensor:
    """Return what a rank sees in a step."""
    return torch.rand(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


@world(2, environment={"ACCELERATE_USE_CPU": "false"})
def test_two_processes_equal_one() -> None:
    """Windows of two batches, clipped: weights equal those of one process over both ranks' data, and so do ranks'."""
    sys.path.insert(0, STAND_INS)
    import torch_xla

    accelerator = Accelerator(gradient_accumulation_steps=2)
    here = current()
    assert here is not None
    assert here.backend == "xla"
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    strategy = strategy_of(prepared)
    assert strategy is not None
    assert strategy.name == "xla"

    alone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    alone.load_state_dict(model.state_dict())  # after prepare: every rank has the weights of the first
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for window in range(3):
        plain.zero_grad()
        for step in (2 * window, 2 * window + 1):
            both = torch.cat([batch(0, step), batch(1, step)])
            (alone(both).square().mean() / 2).backward()
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch(here.rank, step)).square().mean())
                if accelerator.sync_gradients:
                    found = accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        torch.testing.assert_close(found, expected)
        plain.step()
    for trained, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(trained, wanted)
    first, second = gather_object([[parameter.tolist() for parameter in model.parameters()]])
    assert first == second
    assert len(torch_xla.syncs) >= 3 * 3
    accelerator.end_training()
