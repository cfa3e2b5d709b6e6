"""Batch sizes that fit, and memory given back."""

import gc
import weakref

import pytest
import torch

from accel_core.devices.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from accel_core.errors import OutOfMemoryError

FULL = "CUDA out of memory. Tried to allocate 2 GiB"


@pytest.mark.slow
def test_batches_shrink_until_they_fit():
    """By a tenth, rounded down, or as a function says; the size that worked is where the next call starts."""
    tried = []

    def train(batch_size, *, stop):
        tried.append(batch_size)
        if batch_size > stop:
            raise RuntimeError(FULL)
        return batch_size

    run = find_executable_batch_size(train, starting_batch_size=128)
    assert run(stop=95) == 92
    assert run(stop=95) == 92
    assert tried == [128, 115, 103, 92, 92]
    tried.clear()
    sizes = iter([7, 3])
    run = find_executable_batch_size(train, starting_batch_size=16, reduce_batch_size_fn=lambda: next(sizes))
    assert run(stop=3) == 3
    assert tried == [16, 7, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "expected", "said", "tries"),
    [
        (RuntimeError(FULL), OutOfMemoryError, "No executable batch size found, reached zero", [2, 1]),
        (ValueError("a bug"), ValueError, "a bug", [2]),
    ],
)
def test_where_nothing_fits_or_another_error_comes_it_ends(raised, expected, said, tries):
    """Not even one sample fits, or the error is not about memory and comes through at the first size."""
    tried = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        tried.append(batch_size)
        raise raised

    with pytest.raises(expected, match=said):
        train()
    assert tried == tries


@pytest.mark.slow
def test_a_batch_size_of_ones_own_is_refused():
    """A call that passes the batch size too has an argument too many, and the function does not run."""

    @find_executable_batch_size
    def train(batch_size, lr):
        raise AssertionError("must not run")

    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        train(128, 0.1)


@pytest.mark.slow
def test_a_failed_try_leaves_no_tensors_behind():
    """What a try held when memory ran out is free before the next try."""
    alive = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        assert all(reference() is None for reference in alive)
        held = torch.ones(4)
        alive.append(weakref.ref(held))
        if batch_size == 2:
            raise RuntimeError(FULL)

    train()
    assert len(alive) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(FULL), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("something else"), False),
        (ValueError(FULL), False),
        (MemoryError(), False),
    ],
)
def test_which_errors_mean_full_memory(error, expected):
    """Only errors of a device's or torch's allocator count."""
    assert should_reduce_batch_size(error) is expected


@pytest.mark.slow
def test_release_memory_lets_go():
    """Objects that only their caller held are gone after it overwrites its names."""
    held = torch.ones(3)
    reference = weakref.ref(held)
    (held,) = release_memory(held)
    gc.collect()
    assert held is None
    assert reference() is None
    assert release_memory() == []
    assert clear_device_cache(garbage_collection=True) is None
