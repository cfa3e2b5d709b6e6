"""Which device a process uses: the first row whose hardware is here.

A third party adds a row through the entry-point group `accel.devices`; its rows are asked before the built-in ones.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

import torch

from accel_core.devices.device import Device
from accel_core.errors import DeviceUnavailableError

__all__ = ["ORDER", "choose", "named"]

ORDER: tuple[tuple[str, str], ...] = (
    ("xla", "accel_core.devices.xla:XlaDevice"),
    ("mlu", "accel_core.devices.mlu:MluDevice"),
    ("sdaa", "accel_core.devices.sdaa:SdaaDevice"),
    ("musa", "accel_core.devices.musa:MusaDevice"),
    ("npu", "accel_core.devices.npu:NpuDevice"),
    ("hpu", "accel_core.devices.hpu:HpuDevice"),
    ("cuda", "accel_core.devices.cuda:CudaDevice"),
    ("xpu", "accel_core.devices.xpu:XpuDevice"),
    ("neuron", "accel_core.devices.neuron:NeuronDevice"),
    ("mps", "accel_core.devices.mps:MpsDevice"),
    ("cpu", "accel_core.devices.cpu:CpuDevice"),
)
"""(torch's device type, where its class is), in the order in which they are asked."""


@cache
def _rows() -> dict[str, str]:
    """Return the rows of third parties, then the built-in ones."""
    rows = {point.name: point.value for point in entry_points(group="accel.devices")}
    return {**rows, **dict(ORDER)}


@cache
def _load(home: str) -> Device:
    module, _, name = home.partition(":")
    device: Device = getattr(importlib.import_module(module), name)()
    return device


def named(device_type: str) -> Device:
    """Return the kind of hardware that torch calls `device_type`.

    Raises:
        DeviceUnavailableError: No row has that name.
    """
    home = _rows().get(device_type)
    if home is None:
        raise DeviceUnavailableError(
            f"No device is called {device_type!r}; known are {sorted(_rows())}. "
            "Check the spelling, or install the package that provides it."
        )
    return _load(home)


def choose(cpu: bool = False, wanted: str | None = None) -> Device:
    """Choose the hardware of this process.

    Args:
        cpu: Take the CPU whatever else is here.
        wanted: A device as text, such as `cuda:1`; it wins over both.

    Raises:
        DeviceUnavailableError: `wanted` names a device that is not here.
    """
    if wanted:
        device = named(torch.device(wanted).type)
        if not device.is_available():
            raise DeviceUnavailableError(
                f"Device {wanted!r} was asked for and is not available on this machine. "
                "Unset ACCELERATE_TORCH_DEVICE, or name a device that is here."
            )
        return device
    if cpu:
        return named("cpu")
    return next(device for device in (named(name) for name in _rows()) if device.is_available())
