"""A line that tests train: `y = a * x + b`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_NOISE = 0.1


class RegressionDataset:
    """Points near a line, the same for the same seed as Accelerate's."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        # Tests compare with numbers that these points gave.
        points = importlib.import_module("numpy").random.default_rng(seed)
        self.length = length
        self.x = points.normal(size=(length,)).astype("float32")
        self.y = a * self.x + b + points.normal(scale=_NOISE, size=(length,)).astype("float32")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """A line with two parameters, `a` and `b`; it prints the dtypes of its first batch."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Any = None) -> torch.Tensor:
        """Return the line at the tensor `x`."""
        if self.first_batch:
            sys.stdout.write(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}\n")
            self.first_batch = False
        line: torch.Tensor = x * self.a + self.b
        return line
