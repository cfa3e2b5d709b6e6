"""The parts of a run's state, as `accelerate.checkpointing` writes and reads them."""

from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import load_accelerator_state, save_accelerator_state

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_the_scaler_comes_back(tmp_path: Path) -> None:
    """A gradient scaler is restored with the counter, and goes on with the scale that it had."""
    saved, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    save_accelerator_state(str(tmp_path), [], [], [], [], 0, 3, saved)
    assert load_accelerator_state(str(tmp_path), [], [], [], [], 0, other) == {"step": 3}
    assert other.state_dict() == saved.state_dict()
