"""Where a model's weights lie before it trains."""

from __future__ import annotations

import sys

import torch

from accel_core.errors import PreparationError

_Place = int | str | torch.device


def _maps(model: torch.nn.Module) -> list[dict[str, _Place]]:
    """Return the device maps of the model and of its parts."""
    found = (getattr(module, "hf_device_map", None) for module in model.modules())
    return [each for each in found if each]


def devices_of(model: torch.nn.Module) -> set[str]:
    """Return every device that a device map of the model, or of a part of it, names."""
    return {str(device) for each in _maps(model) for device in each.values()}


def is_spread(model: torch.nn.Module) -> bool:
    """Return whether a device map of the model, or of a part of it, places its parts separately."""
    return any(len(each) > 1 for each in _maps(model))


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to the device."""
    # A device map placed the parts, or hooks move weights and inputs together. One with a single device for the whole
    # model does not count.
    placed = is_spread(model) or (_maps(model) and "_hf_hook" in model.__dict__) or "disk" in devices_of(model)
    if not placed:
        model.to(device)


def refuse_empty(model: torch.nn.Module) -> None:
    """Refuse a model that would be moved, and has parameters or buffers on the meta device."""
    if _maps(model) or any("_hf_hook" in vars(module) for module in model.modules()):
        return
    found = next((name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta), None)
    if found is not None:
        raise PreparationError(
            f"A model without weights cannot be trained; got {type(model).__name__} with {found} on the meta device. "
            'Load it without a meta device, or call model.to_empty(device="cpu") and give it its weights, before '
            "prepare()."
        )


def refuse_offloaded(model: torch.nn.Module) -> None:
    """Refuse to train a model with weights on disk; one that is frozen as a whole may be used."""
    if "disk" in devices_of(model) and any(parameter.requires_grad for parameter in model.parameters()):
        raise PreparationError(
            "A model with weights on disk cannot be trained, as their updates would be lost; got a device map that "
            "names the disk. Load the model without one, or freeze it: model.requires_grad_(False)."
        )


def refuse_sharded(model: torch.nn.Module) -> None:
    """Refuse a model that torch's FSDP has sharded, where the run trains whole copies."""
    library = sys.modules.get("torch.distributed.fsdp")  # whoever sharded a model has imported it
    if library is None:
        return
    kinds = (library.FSDPModule, library.FullyShardedDataParallel)
    found = next((name for name, part in model.named_modules() if isinstance(part, kinds)), None)
    if found is not None:
        raise PreparationError(
            f"A model that FSDP shards cannot be copied to every process; got {type(model).__name__}, sharded at "
            f"{found or 'its root'}. Pass fsdp_plugin=FullyShardedDataParallelPlugin(...) to Accelerator."
        )


def is_loaded_in(model: torch.nn.Module, bits: int) -> bool:
    """Return whether transformers says that bitsandbytes packed a model in 8 or 4 bits."""
    return bool(getattr(model, f"is_loaded_in_{bits}bit", False))


def refuse_misplaced(model: torch.nn.Module, device: torch.device) -> None:
    """Refuse a model quantized by bitsandbytes whose weights are not where this process computes.

    Packed weights cannot be moved there: a kernel packs them for the device that they are on.

    Raises:
        PreparationError: The device map names another device alone, or the disk.
    """
    if not (is_loaded_in(model, 8) or is_loaded_in(model, 4)):
        return
    places: set[_Place] = {place for each in _maps(model) for place in each.values()}
    elsewhere = len(places) == 1 and not _is_here(next(iter(places)), device)
    names = devices_of(model)
    if elsewhere or "disk" in names:
        raise PreparationError(
            f"A model in 8 or 4 bits trains on the device of its packed weights, but this process uses {device}; got "
            f"weights on {', '.join(sorted(names))}. Load it with device_map={{'': PartialState().process_index}}."
        )


def _is_here(place: _Place, device: torch.device) -> bool:
    if isinstance(place, int):
        return device.type != "cpu" and place == (device.index or 0)
    if place == "disk":
        return False
    wanted = torch.device(place)
    return wanted.type == device.type and (wanted.index or 0) == (device.index or 0)
