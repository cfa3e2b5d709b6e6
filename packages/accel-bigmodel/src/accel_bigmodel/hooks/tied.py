"""Copies of tied weights on devices, which all modules that share a weight compute with."""

import threading
from collections.abc import Mapping, Sequence

import torch

from accel_bigmodel.hooks.slot import Slot
from accel_bigmodel.memory import used_here
from accel_bigmodel.placement import TiedTensors, as_device

__all__ = ["drop_tied", "load_tied"]

# The copies are noted in one map for all modules of a model, which several threads may run.
_lock = threading.Lock()


def load_tied(
    slot: Slot,
    weights: Mapping[str, torch.Tensor],
    value: torch.Tensor,
    device: torch.device | None,
    tied: TiedTensors,
) -> torch.Tensor:
    """Load a weight that other modules may have loaded already."""
    copies = tied.get(value.data_ptr()) if not value.is_meta else None
    if copies is None:
        return slot.loaded(weights, value, device)
    key = as_device(device) if device is not None else value.device
    with _lock:
        made = copies.get(key)
        # A view of the weight, such as its transpose, begins at the same address.
        is_view = made is not None and made.shape == value.shape and made.stride() != value.stride()
        if made is None or is_view or made.shape != slot.shape or made.dtype != slot.dtype:
            made = copies[key] = slot.loaded(weights, value, device)
    return used_here(made)


def drop_tied(tied: TiedTensors, dropped: Sequence[torch.Tensor | None]) -> None:
    """Forget copies of tied weights that a module releases; modules that still use them hold them."""
    with _lock:
        for copies in tied.values():
            for device in [key for key, copy in copies.items() if any(copy is tensor for tensor in dropped)]:
                del copies[device]
