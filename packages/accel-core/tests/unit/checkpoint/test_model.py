"""Weights that are large enough are put into a model by several threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from accel_core.checkpoint import model
from accel_core.checkpoint.tensor_file import TensorFile, write_tensors
from accel_core.errors import CheckpointDamagedError


class Tied(torch.nn.Module):
    """A model with a shared weight, a switch, and weights that do not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.across = torch.nn.Parameter(torch.rand(4, 6).t())
        self.register_buffer("used", torch.rand(5) > 0.5)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tied, TensorFile]:
    """Return a model and a file of its weights, which threads read whatever their size."""
    monkeypatch.setattr(model, "_SHARED_OUT", 0)
    source = Tied()
    write_tensors(tmp_path / "model.safetensors", source.state_dict())
    return source, TensorFile(tmp_path, "model.safetensors")


def test_threads_put_in_every_weight(stored: tuple[Tied, TensorFile]) -> None:
    """All weights are those of the file, and what was shared or lay across is so still."""
    source, weights = stored
    own = Tied()
    found = model.compare(own, weights, "model 0")
    assert found.findings == []
    assert found.apply is not None
    found.apply()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in own.state_dict().items())
    assert own.second.weight is own.first.weight
    assert own.across.stride() == (1, 6)


def test_weights_of_inference_mode_are_put_in(stored: tuple[Tied, TensorFile]) -> None:
    """Tensors that were made in inference mode are filled in it, which is set for each thread apart."""
    source, weights = stored
    with torch.inference_mode():
        own = Tied()
        apply = model.compare(own, weights, "model 0").apply
        assert apply is not None
        apply()
    assert own.across.is_inference()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in own.state_dict().items())


def test_a_file_that_became_shorter_is_named(stored: tuple[Tied, TensorFile]) -> None:
    """The error of a thread that reads is the one of `load_state`."""
    found = model.compare(Tied(), stored[1], "model 0")
    os.truncate(stored[1].path, stored[1].path.stat().st_size - 100)
    assert found.apply is not None
    with pytest.raises(CheckpointDamagedError, match="became shorter"):
        found.apply()
