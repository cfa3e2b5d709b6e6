"""A fixture of the tests that need a GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def collected() -> Iterator[None]:
    """End the threads of models that hold themselves in cycles, and give their memory back."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
