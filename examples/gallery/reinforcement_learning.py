"""Learn to balance a pole by trial and error, with every process playing games of its own.

    accel launch --cpu --num-processes 2 examples/gallery/reinforcement_learning.py

Shows data that no loader gives: each process plays, the gradients are averaged, and `gather_object` collects the
records of the games.
"""

import math

import torch
from torch import Tensor, nn

from accel import Accelerator, set_seed
from accel_core.comm.objects import gather_object
from report import finish, folder

UPDATES, GAMES, LONGEST = 60, 16, 200


class Poles:
    """Several carts at once, each with a pole that falls unless it is pushed the right way (Barto et al. 1983)."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.state = torch.rand(count, 4, generator=generator) * 0.1 - 0.05
        self.up = torch.ones(count, dtype=torch.bool)

    def push(self, right: Tensor) -> None:
        """Push every cart for a fiftieth of a second, to the right or to the left."""
        _, speed, angle, spin = self.state.T
        force = torch.where(right, 10.0, -10.0)
        sin, cos = angle.sin(), angle.cos()
        thrust = (force + 0.05 * spin**2 * sin) / 1.1
        turning = (9.8 * sin - cos * thrust) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pushing = thrust - 0.05 * turning * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, pushing, spin, turning], 1)
        self.up &= (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < math.radians(12))


def play(policy: nn.Module, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Play games to their end; return the loss that makes good games likelier, and the length of each."""
    poles = Poles(GAMES, generator)
    seen, pushed, counted = [], [], []
    with torch.no_grad():
        while poles.up.any() and len(seen) < LONGEST:
            scores = policy(poles.state.to(device)).squeeze(1).cpu()
            right = torch.rand(GAMES, generator=generator) < scores.sigmoid()
            seen.append(poles.state)
            pushed.append(right)
            counted.append(poles.up.clone())
            poles.push(right)
    alive = torch.stack(counted).float()
    rewards = alive.flip(0).cumsum(0).flip(0)  # how long each game still went on, from every moment
    mean = (rewards * alive).sum() / alive.sum()
    spread = (((rewards - mean) ** 2 * alive).sum() / alive.sum()).sqrt()
    advantage = ((rewards - mean) / (spread + 1e-6) * alive).to(device)
    scores = policy(torch.stack(seen).to(device)).squeeze(2)
    losses = nn.functional.binary_cross_entropy_with_logits(
        scores, torch.stack(pushed).to(scores), weight=advantage, reduction="sum"
    )
    return losses / alive.sum().to(device), alive.sum(0)


def main() -> None:
    """Play, learn from it, and note how long the poles stood."""
    target = folder(__doc__, "reinforcement_learning")
    accelerator = Accelerator()
    set_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    generator = torch.Generator().manual_seed(1 + accelerator.process_index)  # other games on every process

    lengths = []
    for _ in range(UPDATES):
        loss, games = play(policy, generator, accelerator.device)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        records = gather_object([{"process": accelerator.process_index, "lengths": games.tolist()}])
        lengths.append(sum(sum(record["lengths"]) for record in records) / (GAMES * len(records)))

    assert {record["process"] for record in records} == set(range(accelerator.num_processes))
    rows = {
        "processes": accelerator.num_processes,
        "games played": f"{UPDATES * GAMES * accelerator.num_processes:,}",
        "a pole stands for": f"{lengths[0]:.0f} moments at first, {lengths[-1]:.0f} of {LONGEST} in the end",
    }
    finish(accelerator, target, "Reinforcement learning", rows, {"x": range(1, UPDATES + 1), "moments": lengths})


if __name__ == "__main__":
    main()
