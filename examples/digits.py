"""The 1,797 handwritten digits that ship with scikit-learn, and a small vision model for them."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

HELD_OUT = 360


def datasets(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Return the training digits and the held-out ones, split the same way every time.

    Each sample is an image of shape (1, 8, 8) with values in [0, 1] and its digit, a whole number.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:-HELD_OUT], order[-HELD_OUT:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map features of shape (batch, channels, height, width) to the same shape."""
        return torch.relu(x + self.body(x))


class DigitNet(nn.Module):
    """A small residual network that reads an 8 × 8 image."""

    def __init__(self, channels: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(depth))
        self.head = nn.Linear(channels * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        x = torch.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def table(title: str, rows: dict[str, object]) -> str:
    """Lay out names and values under a title, for the end of a run."""
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join(["", title, "-" * max(map(len, [title, *lines])), *lines])
