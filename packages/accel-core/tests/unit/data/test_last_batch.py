"""Gathering for metrics in one process: the last, shorter batch counts its own samples."""

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator


@pytest.mark.parametrize(("samples", "last"), [(7, 1), (8, 2)])
def test_a_loss_repeated_for_a_full_batch_is_cut(fresh_state: None, samples: int, last: int) -> None:
    """A value repeated once a place of a full batch keeps one row a sample of the last batch."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(samples)), batch_size=2))  # type: ignore[arg-type]
    rows = [len(accelerator.gather_for_metrics(torch.tensor(0.5).repeat(2))) for _ in loader]
    assert rows == [2, 2, 2, last]
    assert sum(rows) == samples
