"""Device memory: giving it back, and finding the batch size that fits."""

from __future__ import annotations

import functools
import gc
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

from accel_core.devices import registry
from accel_core.devices.device import module_of
from accel_core.errors import OutOfMemoryError

_SHRINK = 0.9
_SIGNS_OF_FULL_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that the device's allocator holds but does not use back to the device."""
    if garbage_collection:
        gc.collect()
    registry.choose().empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Forget objects and give their memory back.

    Args:
        *objects: The objects; the caller has to overwrite its own names: `a, b = release_memory(a, b)`.

    Returns:
        As many `None` as objects.

    Examples:
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were allocated: on a device if torch counts them, else by this process."""
    most = getattr(module_of(device.type), "max_memory_allocated", None)
    if device.type != "cpu" and most is not None:
        return int(most(device))
    # In bytes on macOS, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception says that memory is full, so that a smaller batch may fit."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError):
        return False
    text = str(exception)
    return any(sign in text for sign in _SIGNS_OF_FULL_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Make a function run again with a smaller batch size until its memory suffices.

    The function takes the batch size first; callers leave it out. After memory ran out the batch size becomes nine
    tenths of what it was, rounded down. The size that worked is where the next call starts.

    Args:
        function: The function, when this is used without parentheses.
        starting_batch_size: The first size to try, in samples.
        reduce_batch_size_fn: Called without arguments, returns the next size to try instead.

    Returns:
        The function without its first parameter.

    Raises:
        OutOfMemoryError: Not even one sample fits.
        TypeError: The function is called with a batch size too, or takes none.

    Examples:
        >>> @find_executable_batch_size(starting_batch_size=100)
        ... def train(batch_size):
        ...     if batch_size > 85:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train()
        81
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    target = function
    batch_size = starting_batch_size

    @functools.wraps(target)
    def run(*args: object, **kwargs: object) -> object:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return target(batch_size, *args, **kwargs)
            except RuntimeError as failure:
                if not should_reduce_batch_size(failure):
                    raise
            # Outside of `except`: until there, the traceback holds what the failed call allocated.
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * _SHRINK) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise OutOfMemoryError(
            f"No executable batch size found, reached zero: `{target.__name__}` ran out of memory with every size; got "
            f"sizes from {starting_batch_size} down. Free memory, use a smaller model, or a lower precision."
        )

    return run
