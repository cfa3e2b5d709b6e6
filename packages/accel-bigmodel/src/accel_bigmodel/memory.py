"""How much memory each device has."""

from collections.abc import Mapping
from types import ModuleType

import torch

from accel_bigmodel.sizes import number_or_text
from accel_core.errors import ConfigurationError, expect
from accel_core.modules.sizes import convert_file_size_to_int

_NAMED = ("mps", "cpu", "disk")


def accelerator_module() -> ModuleType | None:
    """Return torch's module for the accelerator of this machine."""
    return (
        torch.get_device_module(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None
    )


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return how many bytes each device may hold.

    Args:
        max_memory: Bytes or written sizes by device: indices of accelerators (0 or "0"), "mps", "cpu", "disk". By
            default the free memory of every accelerator and the available memory of the machine. Written sizes of a
            dict become bytes in it: callers go on to compare them with what is returned.

    Returns:
        Bytes by device: accelerators in order, then "mps", "cpu" and "disk", as far as they are given. Memory that an
        accelerator shares with the host is the accelerator's alone.

    Raises:
        ConfigurationError: When a device is none, or a size cannot be read.
        UnsupportedTypeError: When `max_memory` is not a mapping.

    Examples:
        >>> get_max_memory({"cpu": "2GB", "disk": "1GiB"})
        {'cpu': 2000000000, 'disk': 1073741824}
    """
    if max_memory is None:
        return _available()
    fits = isinstance(max_memory, Mapping)
    expect(fits, max_memory, "`max_memory` maps devices to sizes", 'Write it as {0: "20GiB", "cpu": "60GiB"}.')
    given: dict[int | str, int] = {}
    for device, size in max_memory.items():
        name: int | str = number_or_text(device) if isinstance(device, str) else device
        if isinstance(name, bool) or not (isinstance(name, int) or name in _NAMED):
            raise ConfigurationError(
                f"Device {device!s:.80} is not recognized; got {device!r:.80} in `max_memory`. Use the index of an "
                "accelerator, 'mps', 'cpu' or 'disk'."
            )
        given[name] = convert_file_size_to_int(size)
    if isinstance(max_memory, dict):
        written = {device: size for device, size in max_memory.items() if isinstance(size, str)}
        max_memory.update({device: convert_file_size_to_int(size) for device, size in written.items()})
    accelerators = sorted(name for name in given if isinstance(name, int))
    ordered: list[int | str] = [*accelerators, *(name for name in _NAMED if name in given)]
    return {name: given[name] for name in ordered}


def _available() -> dict[int | str, int]:
    import psutil  # here, because every import of the drop-in would wait for it

    free = int(psutil.virtual_memory().available)
    module = accelerator_module()
    if module is torch.mps:
        return {"mps": free}
    found: dict[int | str, int] = {}
    shared = False
    for index in range(0 if module is None else module.device_count()):
        assert module is not None, "it has devices"
        if _is_integrated(module, index):
            # The driver's free memory leaves out what the host would release at once.
            found[index], shared = free, True
        else:
            found[index] = int(module.mem_get_info(index)[0])
    return found if shared else {**found, "cpu": free}  # memory that both share counts once


def _is_integrated(module: ModuleType, index: int) -> bool:
    """Return whether an accelerator uses the host's memory, as on a Jetson or GB10."""
    ask = getattr(module, "get_device_properties", None)
    return ask is not None and bool(getattr(ask(index), "is_integrated", False))


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the allocator that the current stream computes with a tensor, which another stream may have loaded."""
    if tensor.device.type not in ("cpu", "meta", "mps", "xla"):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor
