"""Where the tensors of one model go: names, ties and devices, resolved once before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from accel_bigmodel.device_map.check import (
    AnyDevice,
    check_device_map,
    check_devices,
    check_tied_parameters_on_same_device,
    device_of,
    in_names_of,
    loads_whole,
    main_device_of,
)
from accel_bigmodel.memory import accelerator_module, get_max_memory
from accel_bigmodel.sizes import Dtype, named_tensors
from accel_core._records import record
from accel_core.errors import DeviceMapError
from accel_core.modules.sizes import as_dtype, tensor_bytes, written_size
from accel_core.modules.ties import find_tied_parameters


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
        devices: dict[str, AnyDevice] = {n: "cpu" if one.is_meta else one.device for n, one in named_tensors(model)}
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
        """Make sure that the accelerator which offloaded blocks come to has memory for the largest of them.

        Those in `alone` come part by part.
        """
        main, accelerator = torch.device(self.main), accelerator_module()
        if main.type in ("cpu", "meta", "mps") or accelerator is None or not hasattr(accelerator, "mem_get_info"):
            return
        room = int(accelerator.mem_get_info(main)[1])
        for name, module in self.model.named_modules():
            together = loads_whole(module, preload_module_classes)
            count = sum(
                tensor_bytes(tensor, as_dtype(dtype))
                for key, tensor in module.named_parameters(recurse=together)
                if str(self.device_of(f"{name}.{key}" if name else key)) in ("cpu", "disk")
            )
            if count > room and name not in alone:
                raise DeviceMapError(
                    f"An offloaded block is larger than the device that runs it; got {name!r} of "
                    f"{written_size(count)} for {main}, which has {written_size(room)} in all. Let its parts be loaded "
                    "one by one, or keep the model off that device: a map of 'cpu' and 'disk' alone runs on the CPU."
                )

    def room_left(self, max_memory: Mapping[int | str, int | str], dtype: Dtype | None) -> int | None:
        """Count the bytes for prefetched weights within the limit of the device that offloaded parts compute on."""
        limit = get_max_memory(max_memory).get(self.main) if isinstance(self.main, (int, str)) else None
        if limit is None or self.main == "cpu":
            return None
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        used = sum(tensor_bytes(value, as_dtype(dtype)) for name, value in tensors if self.device_of(name) == self.main)
        return max(limit - used, 1)
