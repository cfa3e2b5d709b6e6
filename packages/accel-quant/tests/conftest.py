"""Fixtures of every test of accel-quant."""

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from accel_testing.guards import *  # noqa: F403


@pytest.fixture
def weights(trained: nn.Module, tmp_path: Path) -> Path:
    """Return a folder with the weights of the model that a file's `trained` makes."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(trained.state_dict(), folder / "model.safetensors")
    return folder
