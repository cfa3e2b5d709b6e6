"""What every test here has: they need a GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def collected(fresh_state: None) -> Iterator[None]:
    """Skip without a GPU; end the threads of models that hold themselves in cycles, and give their memory back."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
