"""Where a model's weights lie before it trains."""

from __future__ import annotations

import torch

from accel_core.errors import PreparationError

__all__ = ["devices_of", "move", "refuse_offloaded"]


def devices_of(model: torch.nn.Module) -> set[str]:
    """Return every place that a device map of the model, or of a part of it, names."""
    return {
        str(device) for module in model.modules() for device in (getattr(module, "hf_device_map", None) or {}).values()
    }


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to the device; one that a device map placed stays where it is."""
    if not getattr(model, "hf_device_map", None):
        model.to(device)


def refuse_offloaded(model: torch.nn.Module) -> None:
    """Refuse to train a model whose weights a device map left on the disk.

    Raises:
        PreparationError: The device map names the disk.
    """
    if "disk" in devices_of(model):
        raise PreparationError(
            "A model with weights on disk (its device map says so) cannot be trained: their updates "
            "would be lost. Load it without a device map, or with one that keeps every weight on a device."
        )
