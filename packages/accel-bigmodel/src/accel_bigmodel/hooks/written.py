"""What was written to the copy of an offloaded weight, kept before the copy is dropped."""

from collections.abc import Mapping, MutableMapping

import torch
from torch import nn

from accel_bigmodel.hooks.slot import Slot
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import normal_tensors
from accel_core.errors import OffloadError
from accel_core.modules import packed

__all__ = ["keep_written"]


def keep_written(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    slot: Slot,
    placed: torch.Tensor,
    value: torch.Tensor,
    compare: bool,
) -> None:
    """Store a weight that was written to in a copy, which is about to be dropped."""
    if slot.version is None or packed.find(slot.placeholder) is not None:
        return
    # Batch normalization updates its statistics without counting it as a write.
    compare = compare or (module.training and not slot.is_parameter)
    if placed._version == slot.version and not (compare and _differ(placed, value)):
        return
    with normal_tensors():
        now = weights.get(slot.name) if slot.tied_to is None else slot.stored_in(weights)
        if now is None or (now is not value and _differ(now, value)):
            return  # somebody has put another value into the map meanwhile, which counts
        dataset = weights.dataset if isinstance(weights, PrefixedDataset) else weights
        target = dataset.state_dict if isinstance(dataset, OffloadedWeightsLoader) else dataset
        if not isinstance(target, MutableMapping):
            raise OffloadError(
                "An offloaded weight was written to, and its weights map cannot take the new value; got "
                f"{slot.name!r} of {type(module).__name__} in a {type(target).__name__}. Use a mutable "
                "mapping, or write to the weight before it is offloaded."
            )
        kept = placed.detach().to("cpu")
        if isinstance(weights, PrefixedDataset):
            for name in {*slot.placeholder.__dict__.get("names", ()), weights.prefix + slot.name}:
                if name in dataset:
                    target[name] = kept
        else:
            target[slot.name] = kept


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ in any bit, once they are of one dtype."""
    if one.shape != other.shape:
        return True
    first = one.detach().to("cpu").contiguous()
    second = other.detach().to(device="cpu", dtype=one.dtype).contiguous()
    return not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
