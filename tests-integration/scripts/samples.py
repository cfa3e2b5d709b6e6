"""Small real data for the scripts: handwritten digits, or the text of Python itself where scikit-learn is missing."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

CLASSES = 10


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def text() -> torch.Tensor:
    """Return the characters of a module of Python as numbers below 64."""
    return torch.tensor([ord(letter) % 64 for letter in inspect.getsource(argparse)])


def _letters() -> tuple[torch.Tensor, torch.Tensor]:
    letters = text()[: 64 * 1800].reshape(-1, 64)
    return letters / 64, letters.sum(1) % CLASSES


def digits(first: int, last: int) -> TensorDataset:
    """Return the samples from `first` to `last`: 64 numbers between 0 and 1, and a class."""
    try:
        values, classes = _digits()
    except ImportError:
        values, classes = _letters()
    return TensorDataset(values[first:last], classes[first:last])


def classifier() -> nn.Module:
    """Return a small classifier of these samples."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def begin(accelerator: Accelerator, seed: int, optimizer: Any, *loaders: Any, **options: Any) -> Any:
    """Return a classifier from a seed, its optimizer with options, and loaders, prepared."""
    set_seed(seed)
    model = classifier()
    return accelerator.prepare(model, optimizer(model.parameters(), **options), *loaders)


def train_on(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    """Make a step on a batch, and return its loss."""
    values, classes = batch
    loss = cross_entropy(model(values), classes)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def report(accelerator: Accelerator, **numbers: Any) -> None:
    """Print the numbers of a script as one line of JSON, on the main process, and end."""
    accelerator.wait_for_everyone()
    accelerator.print(json.dumps({"processes": accelerator.num_processes, **numbers}))
    accelerator.end_training()


def norm(accelerator: Accelerator, model: nn.Module) -> list[float]:
    """Return the norm of each of a model's weights, which tells two models apart."""
    return [value.double().norm().item() for value in accelerator.unwrap_model(model).state_dict().values()]
