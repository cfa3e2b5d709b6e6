"""Half precision for programs that wrap forwards themselves."""

import pytest
import torch

from accel_core.accelerator import Accelerator
from accelerate._precision import (
    ConvertOutputsToFp32,
    filter_first_and_last_linear_layers,
    get_mixed_precision_context_manager,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_outputs_come_back_in_fp32() -> None:
    """A wrapped forward computes in its own precision and gives fp32."""
    forward = ConvertOutputsToFp32(torch.nn.Linear(1, 1).to(torch.bfloat16).forward)
    assert forward(torch.ones(1, 1, dtype=torch.bfloat16)).dtype is torch.float32


def test_context_follows_the_run() -> None:
    """The functional context computes in the run's precision, and does nothing without native_amp."""
    Accelerator(mixed_precision="bf16")
    x = torch.ones(2, 2)
    with get_mixed_precision_context_manager(True):
        assert (x @ x).dtype is torch.bfloat16
    with get_mixed_precision_context_manager(False):
        assert (x @ x).dtype is torch.float32


def test_filter_takes_inner_layers_of_fitting_size() -> None:
    """Only linear layers whose sizes are multiples of 16, and neither the first nor the last."""
    layer = torch.nn.Linear(32, 32)
    assert filter_first_and_last_linear_layers(layer, "some.inner") is True
    assert filter_first_and_last_linear_layers(layer, "") is False
    assert filter_first_and_last_linear_layers(torch.nn.Linear(3, 32), "some.inner") is False
    assert filter_first_and_last_linear_layers(torch.nn.ReLU(), "some.inner") is False
