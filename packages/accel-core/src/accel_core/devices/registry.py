"""Which device a process uses: the first row whose hardware is here.

A third party adds a row through the entry-point group `accel.devices`; its rows are asked before the built-in ones.
"""

from __future__ import annotations

from functools import cache

from accel_core.devices.device import Device
from accel_core.errors import DeviceUnavailableError
from accel_core.host.installed import points_of
from accel_core.options.engines import load
from accel_core.options.hardware import HARDWARE

ORDER: tuple[str, ...] = tuple(hardware.name for hardware in HARDWARE)
"""The built-in kinds by torch's name, in the order in which they are asked."""


_CLASSES = {
    "xla": "accel_core.devices.xla:XlaDevice",
    "mps": "accel_core.devices.mps:MpsDevice",
    "cpu": "accel_core.devices.cpu:CpuDevice",
}
"""Classes of the kinds that torch does not drive through a module of their name alone."""


def _kinds() -> list[str]:
    """Return the names of all kinds of device: those of third parties, then the built-in ones."""
    return list(dict.fromkeys([*points_of("accel.devices"), *ORDER]))


@cache
def named(device_type: str) -> Device:
    """Return the kind of hardware that torch calls `device_type`, or refuse a name that no row has."""
    if device_type not in _kinds():
        raise DeviceUnavailableError(
            f"Unknown device; got {device_type!r}, which is not one of {sorted(_kinds())}. Check the spelling, or "
            "install the package that provides it."
        )
    rows = {row.name: row for row in HARDWARE}
    if device_type not in rows:
        foreign: Device = load(points_of("accel.devices")[device_type])()
        return foreign
    kind: type[Device] = load(_CLASSES[device_type]) if device_type in _CLASSES else Device
    return kind(rows[device_type])


def choose(cpu: bool = False, wanted: str | None = None) -> Device:
    """Choose the hardware of this process.

    Raises:
        DeviceUnavailableError: `wanted` names a device that is not here.
    """
    if wanted:
        device = named(wanted.partition(":")[0])  # torch.device() knows no device whose extension is not loaded
        if not device.is_available():
            raise DeviceUnavailableError(
                f"The device is not available on this machine; got {wanted!r}. Unset ACCELERATE_TORCH_DEVICE, or name "
                "a device that is here."
            )
        return device
    if cpu:
        return named("cpu")
    return next(device for device in map(named, _kinds()) if device.is_available())
