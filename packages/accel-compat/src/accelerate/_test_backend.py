"""The device on which tests run, how many there are of it, and what tells how much of its memory is taken."""

from __future__ import annotations

from collections.abc import Callable

from accel_core.devices import registry

_MEMORY = {"mps": "current_allocated_memory"}
"""Names of the function that counts bytes, where it is not `memory_allocated`."""


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device's name in torch, its number, and a function for the bytes taken, 0 where it counts none."""
    device = registry.choose()
    name = _MEMORY.get(device.name, "memory_allocated")
    # They count no bytes.
    counter = None if device.name in ("cpu", "xla") else getattr(device.module, name, None)
    return device.name, max(1, device.count()), counter or (lambda: 0)


torch_device, device_count, memory_allocated_func = get_backend()
