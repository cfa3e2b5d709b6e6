"""Whether a device map fits its model."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from accel_bigmodel.sizes import named_tensors
from accel_core.devices.device import module_of
from accel_core.errors import DeviceMapError, DeviceUnavailableError
from accel_core.logging import get_logger
from accel_core.modules.compilation import is_compiled_module
from accel_core.modules.traversal import get_non_persistent_buffers
from accel_core.modules.unwrap import canonical_name

logger = get_logger(__name__)

AnyDevice = int | str | torch.device
_Device = TypeVar("_Device", bound=AnyDevice)
_Value = TypeVar("_Value")


def device_of(name: str, device_map: Mapping[str, AnyDevice]) -> AnyDevice | None:
    """Look up where a device map puts a module or tensor."""
    while True:
        if name in device_map:
            return device_map[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def in_names_of(model: nn.Module, table: Mapping[str, _Value]) -> Mapping[str, _Value]:
    """Return a table under a model's own names, with or without the `_orig_mod` of `torch.compile`."""
    compiled = "torch._dynamo" in sys.modules and any(is_compiled_module(module) for module in model.modules())
    if not compiled and not any("_orig_mod" in name for name in table):
        return table
    names = {name: None for name, _ in (*model.named_modules(remove_duplicate=False), *named_tensors(model))}
    known: dict[str, str] = {}
    for name in names:
        known.setdefault(_path(name), name)
    own = {name: name if name in names else known.get(_path(name), name) for name in table}
    return {name if own[name] in table else own[name]: value for name, value in table.items()}


def _path(name: str) -> str:
    """Return the name of a module or tensor without the prefixes of wrappers; that of the model inside is empty too."""
    return canonical_name(f"{name}.").rstrip(".")


def check_device_map(model: nn.Module, device_map: Mapping[str, AnyDevice]) -> None:
    """Check that a device map places every tensor of a model, and none both on the disk and elsewhere.

    Buffers that `state_dict` leaves out need no device: one that has none stays where it is.

    Args:
        model: The model.
        device_map: Devices by name of submodule or tensor; the model's own is `""`.

    Raises:
        DeviceMapError: When some tensors have no device, or two of which one is the disk; all of them are named.

    Examples:
        >>> check_device_map(model, {"blocks": "cpu", "head": "disk"})
    """
    names = [name for name, _ in named_tensors(model)]
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(names)
    strange = [name for name in device_map if name not in known]
    if strange:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {strange}", stacklevel=2
        )
    missing = [name for name in names if device_of(name, device_map) is None]
    if missing:
        scratch = get_non_persistent_buffers(model, recurse=True, fqns=True)  # only now: it walks over all modules
        missing = [name for name in missing if name not in scratch]
    if missing:
        raise DeviceMapError(
            "The device_map provided does not give any device for the following parameters: "
            f"{', '.join(missing)}; got devices for {len(names) - len(missing)} of {len(names)} tensors. Add the "
            "missing ones, or a device for the whole model under the name ''."
        )
    doubled = {name: places for name in names if len(places := _devices_of(name, device_map)) > 1 and "disk" in places}
    if doubled:
        listed = "; ".join(f"{name} on {' and on '.join(places)}" for name, places in doubled.items())
        raise DeviceMapError(
            f"The device_map provided puts tensors in two places; got {listed}. Give a module an entry of its own, or "
            "its parts, not both."
        )


def _devices_of(name: str, device_map: Mapping[str, AnyDevice]) -> list[str]:
    """List the devices that a tensor's entry and those of the modules around it name, innermost first."""
    found = {str(device_map[name]): None} if name in device_map else {}
    while name:
        name = name.rpartition(".")[0]
        if name in device_map:
            found[str(device_map[name])] = None
    return list(found)


def check_devices(device_map: Mapping[str, AnyDevice]) -> None:
    """Refuse a map that names what is not a device, or one that is not on this machine."""
    places: dict[AnyDevice, str] = {}
    for name, device in device_map.items():
        places.setdefault(device, name)
    for device, name in places.items():
        if isinstance(device, int):
            index, count = device, torch.accelerator.device_count()
        elif str(device) in ("cpu", "disk", "meta"):
            continue
        else:
            wanted = _as_torch(device, name)
            module = module_of(wanted.type)
            if module is None or not hasattr(module, "device_count"):
                continue
            index, count = wanted.index or 0, int(module.device_count())
        if index >= count:
            raise DeviceUnavailableError(
                f"The device_map provided names a device that is not here; got {device!r} for {name!r}, and {count} "
                "devices of that kind. Use those that are here, 'cpu' or 'disk'."
            )


def _as_torch(device: str | torch.device, name: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as failure:
        raise DeviceMapError(
            f"The device_map provided names something that is not a device; got {device!r} for {name!r}. Use the index "
            "of an accelerator, 'cpu', 'disk', or a device as torch writes it, such as 'cuda:0'."
        ) from failure


def main_device_of(device_map: Mapping[str, AnyDevice]) -> AnyDevice:
    """Name the device that offloaded parts compute on."""
    return next((device for device in device_map.values() if str(device) not in ("cpu", "disk")), "cpu")


def loads_whole(module: nn.Module, classes: Sequence[str] | None) -> bool:
    """Return whether the weights of a module's submodules have to be loaded with its own."""
    return isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) or (
        classes is not None and type(module).__name__ in classes
    )


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, AnyDevice]
) -> None:
    """Warn when a device map tears tied parameters apart."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Please modify your custom device map or set "
                "`device_map='auto'`.",
                devices,
            )


def clean_device_map(device_map: dict[str, _Device], module_name: str = "") -> dict[str, _Device]:
    """Shorten a device map: parts that all go to one device become their parent's entry."""
    below: dict[str, set[_Device]] = {}
    members: dict[str, list[str]] = {}
    for name, device in device_map.items():
        above = name
        while above:
            above = above.rpartition(".")[0]
            below.setdefault(above, set()).add(device)
            members.setdefault(above, []).append(name)
    start = f"{module_name}." if module_name else ""
    # Outermost first: what is merged into a parent need not be merged below it.
    for name in sorted(below, key=lambda name: (name.count(".") + bool(name), name)):
        inside = name == module_name or name.startswith(start)
        present = [member for member in members[name] if member in device_map]
        if not inside or len(below[name]) > 1 or len(present) < 2:
            continue
        if name in device_map and device_map[name] not in below[name]:
            continue
        device = device_map[present[0]]
        for member in present:
            del device_map[member]
        device_map[name] = device
    return device_map
