"""Train two networks against each other: one draws digits, the other tells drawn ones from real ones.

    accel launch --cpu --num-processes 2 examples/gallery/gan.py

Shows two models with an optimizer each in one Accelerator. All processes draw the noise of the whole batch from one
seed, and each uses its own part of it: any number of processes trains on the same noise.
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed
from report import finish, folder

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import datasets

EPOCHS, NOISE = 30, 16


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with a leaky ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def own_noise(accelerator: Accelerator, count: int, chance: torch.Generator) -> torch.Tensor:
    """Draw noise for so many images of every process; return the part of this one."""
    everything = torch.randn(accelerator.num_processes, count, NOISE, generator=chance)
    return everything[accelerator.process_index].to(accelerator.device)


def picture(image: torch.Tensor) -> str:
    """Return an image in characters."""
    return "".join("\n    " + "".join(" .:*#"[int(value * 4.99)] * 2 for value in row) for row in image)


def main() -> None:
    """Take turns: the judge learns from real and drawn digits, then the painter learns from the judge."""
    target = folder(__doc__, "gan")
    accelerator = Accelerator()
    set_seed(0)
    painter, judge = nn.Sequential(mlp(NOISE, 128, 128, 64), nn.Sigmoid()), mlp(64, 64, 1)
    brush = torch.optim.Adam(painter.parameters(), lr=1e-3, betas=(0.5, 0.999))
    eye = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(datasets()[0], batch_size=32, shuffle=True)
    painter, judge, brush, eye, loader = accelerator.prepare(painter, judge, brush, eye, loader)

    chance = torch.Generator().manual_seed(1)
    painter_losses, judge_losses = [], []
    for _ in range(EPOCHS):
        for images, _labels in loader:
            real = images.flatten(1)
            drawn = painter(own_noise(accelerator, len(real), chance))
            verdicts = judge(torch.cat([real, drawn.detach()])).squeeze(1)
            truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(verdicts)
            judge_loss = nn.functional.binary_cross_entropy_with_logits(verdicts, truth)
            accelerator.backward(judge_loss)
            eye.step()
            eye.zero_grad()

            verdict = judge(drawn).squeeze(1)
            painter_loss = nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
            accelerator.backward(painter_loss)
            brush.step()
            brush.zero_grad()
            eye.zero_grad()  # what the painter's step left in the judge
        both = accelerator.reduce(torch.stack([painter_loss.detach(), judge_loss.detach()]), "mean")
        painter_losses.append(float(both[0]))
        judge_losses.append(float(both[1]))

    with torch.no_grad():
        drawn = painter(own_noise(accelerator, 64, chance))
        fooled = accelerator.gather((judge(drawn).squeeze(1) > 0).float()).mean()
    rows = {
        "processes": accelerator.num_processes,
        "drawn digits taken for real": f"{100 * float(fooled):.0f} %",
        "one of them": picture(drawn[0].view(8, 8)),
    }
    finish(accelerator, target, "GAN", rows, {"painter's loss": painter_losses, "judge's loss": judge_losses})


if __name__ == "__main__":
    main()
