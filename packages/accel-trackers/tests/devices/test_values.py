"""Values on a GPU are logged as numbers."""

from typing import Any

import pytest
import torch

from accel_trackers.flatten import as_scalar, flatten
from accel_trackers.values import sort

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_value_on_the_device_is_logged_as_on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A tensor of one element, with or without a gradient, is the number that it is on the CPU."""
    value = torch.ones(shape, dtype=dtype)
    moved: Any = value.to(DEVICE).requires_grad_(dtype.is_floating_point)
    assert as_scalar(moved) == as_scalar(value) == 1
    assert sort({"loss": moved}) == sort({"loss": value})


def test_a_configuration_with_tensors_is_shown() -> None:
    """Short and long tensors of the device flatten without an error, to texts and numbers alone."""
    config = {"weights": torch.arange(3.0, device=DEVICE), "large": torch.zeros(100, 100, device=DEVICE)}
    assert {type(value) for value in flatten(config).values.values()} <= {str, int, float, bool}
