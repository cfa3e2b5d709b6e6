"""Learn to balance a pole by trial and error, with every process playing its share of the games.

    accel launch --cpu --num-processes 2 examples/gallery/reinforcement_learning.py

Shows data that no loader gives: processes share the games out, `reduce` measures how good a game is beside all of them,
`backward(sum, weight=count)` gives the gradient of the mean over all moves, and `gather_object` collects the records.
All processes draw the chances of all games from one seed, so one process learns the same as several.
"""

import math

import torch
from torch import Tensor, nn

from accel import Accelerator, set_seed
from accel_core.comm.objects import gather_object
from report import finish, folder

UPDATES, GAMES, LONGEST = 60, 32, 200


class Poles:
    """Several carts at once, each with a pole that falls unless it is pushed the right way (Barto et al. 1983)."""

    def __init__(self, beginnings: Tensor) -> None:
        self.state = beginnings * 0.1 - 0.05
        self.up = torch.ones(len(beginnings), dtype=torch.bool)

    def push(self, right: Tensor) -> None:
        """Push every cart for a fiftieth of a second, to the right or to the left."""
        _, speed, angle, spin = self.state.T
        force = torch.where(right, 10.0, -10.0)
        sin, cos = angle.sin(), angle.cos()
        thrust = (force + 0.05 * spin**2 * sin) / 1.1
        turning = (9.8 * sin - cos * thrust) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pushing = thrust - 0.05 * turning * cos / 1.1
        moved = self.state + 0.02 * torch.stack([speed, pushing, spin, turning], 1)
        self.state = torch.where(self.up[:, None], moved, self.state)  # what has fallen lies still
        self.up &= (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < math.radians(12))


def play(policy: nn.Module, games: Tensor, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Play games from their chances; return a loss for each moment that makes good games likelier, and who stood."""
    poles = Poles(games[:, :4])
    seen, pushed, counted = [], [], []
    with torch.no_grad():
        for chance in games[:, 4:].T:
            scores = policy(poles.state.to(accelerator.device)).squeeze(1).cpu()
            seen.append(poles.state)
            pushed.append(chance < scores.sigmoid())
            counted.append(poles.up.clone())
            poles.push(pushed[-1])
    alive = torch.stack(counted).float().to(accelerator.device)
    rewards = alive.flip(0).cumsum(0).flip(0)  # how long each game still went on, from every moment
    count, total, squares = accelerator.reduce(torch.stack([alive.sum(), rewards.sum(), rewards.square().sum()]), "sum")
    mean = total / count
    advantage = (rewards - mean) / ((squares / count - mean**2).sqrt() + 1e-6) * alive
    scores = policy(torch.stack(seen).to(accelerator.device)).squeeze(2)
    losses = nn.functional.binary_cross_entropy_with_logits(
        scores, torch.stack(pushed).to(scores), weight=advantage, reduction="none"
    )
    return losses, alive


def main() -> None:
    """Play, learn from it, and note how long the poles stood."""
    target = folder(__doc__, "reinforcement_learning")
    accelerator = Accelerator()
    set_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    chance = torch.Generator().manual_seed(1)

    lengths = []
    for _ in range(UPDATES):
        chances = torch.rand(GAMES, 4 + LONGEST, generator=chance)
        games = chances.chunk(accelerator.num_processes)[accelerator.process_index]
        losses, alive = play(policy, games, accelerator)
        accelerator.backward(losses.sum(), weight=alive.sum())
        optimizer.step()
        optimizer.zero_grad()
        records = gather_object([{"process": accelerator.process_index, "lengths": alive.sum(0).tolist()}])
        lengths.append(sum(sum(record["lengths"]) for record in records) / GAMES)

    assert {record["process"] for record in records} == set(range(accelerator.num_processes))
    rows = {
        "processes": accelerator.num_processes,
        "games played": f"{UPDATES * GAMES:,}",
        "a pole stands for": f"{lengths[0]:.0f} moments at first, {lengths[-1]:.0f} of {LONGEST} in the end",
    }
    finish(accelerator, target, "Reinforcement learning", rows, {"x": range(1, UPDATES + 1), "moments": lengths})


if __name__ == "__main__":
    main()
