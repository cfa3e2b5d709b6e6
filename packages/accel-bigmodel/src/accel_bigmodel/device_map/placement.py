"""Where the tensors of one model go: names, ties and devices, resolved once before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from accel_bigmodel.device_map.check import (
    AnyDevice,
    check_blocks_fit,
    check_device_map,
    check_devices,
    check_tied_parameters_on_same_device,
    device_of,
    in_names_of,
    main_device_of,
)
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype
from accel_core._records import record
from accel_core.modules.sizes import as_dtype, tensor_bytes
from accel_core.modules.ties import find_tied_parameters

__all__ = ["Placement"]


@record(frozen=True)
class Placement:
    """A model, and where each of its tensors goes."""

    model: nn.Module  # the model
    given: Mapping[str, AnyDevice]  # the device map as the caller wrote it, which the model shows as `hf_device_map`
    devices: Mapping[str, AnyDevice]  # the same under the model's own names
    # Groups of names of one parameter, before loading or hooks put tensors of their own in their place.
    tied: list[list[str]]
    main: AnyDevice  # where parts that wait on "cpu" or "disk" compute
    away: dict[str, bool]  # whether the weights of an entry are away between forwards
    compute: dict[str, AnyDevice]  # where an entry computes

    @classmethod
    def of(
        cls, model: nn.Module, device_map: Mapping[str, AnyDevice], main_device: AnyDevice | None = None
    ) -> Placement:
        """Resolve a device map.

        Raises:
            DeviceMapError: When the map misses a tensor, has one on the disk and elsewhere, or names an unknown device.
            DeviceUnavailableError: When the map names a device that is not here.
        """
        devices = in_names_of(model, device_map)
        check_device_map(model, devices)
        check_devices(devices)
        tied = find_tied_parameters(model)
        check_tied_parameters_on_same_device(tied, devices)
        main = main_device_of(devices) if main_device is None else main_device
        # A main device with the CPU's memory has no use for weights that wait in the same memory.
        kinds = ("disk",) if str(main) in ("cpu", "mps") else ("cpu", "disk")
        away = {name: str(device) in kinds for name, device in devices.items()}
        compute = {name: main if str(device) in ("cpu", "disk") else device for name, device in devices.items()}
        return cls(model, device_map, devices, tied, main, away, compute)

    @classmethod
    def standing(cls, model: nn.Module) -> Placement:
        """Leave every tensor on the device it has; empty ones go to the CPU."""
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        devices: dict[str, AnyDevice] = {name: "cpu" if one.is_meta else one.device for name, one in tensors}
        return cls(model, devices, devices, find_tied_parameters(model), "cpu", dict.fromkeys(devices, False), devices)

    def device_of(self, name: str) -> AnyDevice | None:
        """Look up where a module or tensor goes."""
        return device_of(name, self.devices)

    def waits_on(self, place: str) -> list[str]:
        """List the entries whose weights are away on the "cpu" or the "disk"."""
        return [name for name, device in self.devices.items() if self.away[name] and str(device) == place]

    def going_to(self, place: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of some tensors that go to a device."""
        return {name: value for name, value in tensors.items() if str(self.device_of(name)) == place}

    def check_blocks_fit(
        self, preload_module_classes: list[str] | None, dtype: Dtype | None = None, alone: Collection[str] = ()
    ) -> None:
        """Check that the device of offloaded blocks has room for the largest one; those in `alone` come in parts."""
        wanted = as_dtype(dtype)
        check_blocks_fit(
            self.model,
            self.devices,
            self.main,
            preload_module_classes,
            wanted if isinstance(wanted, torch.dtype) else None,
            alone,
        )

    def room_left(self, max_memory: Mapping[int | str, int | str], dtype: Dtype | None) -> int | None:
        """Count the bytes for prefetched weights within the limit of the device that offloaded parts compute on."""
        limit = get_max_memory(max_memory).get(self.main) if isinstance(self.main, (int, str)) else None
        if limit is None or self.main == "cpu":
            return None
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        used = sum(tensor_bytes(value, as_dtype(dtype)) for name, value in tensors if self.device_of(name) == self.main)
        return max(limit - used, 1)
