"""Weights that bitsandbytes packed: which of them compute in shards what the whole did."""

from __future__ import annotations

import torch
from torch import nn

from accel_core.comm.control import Channel
from accel_core.errors import PreparationError
from accel_core.host.availability import imported
from accel_core.process.world import World
from accel_core.strategies.fingerprint import fingerprint_of
from accel_core.strategies.placement import is_loaded_in


def refuse_packed(
    model: nn.Module, world: World, device: torch.device, *, cast: torch.dtype | None, integers: bool
) -> None:
    """Refuse packed weights whose shards do not compute what the whole did; every rank calls it.

    Raises:
        PreparationError: Weights in 8 bits, whose statistics are attributes of a parameter that shards lose. In 4 bits
            on a CPU, where an evaluation repacks gathered weights and training goes on with wrong ones. Or in 4 bits
            whose storage would be cast, or with statistics that are not those of the first rank.
    """
    four = _parameters_of(model, "Params4bit")
    in_eight = is_loaded_in(model, 8) or bool(_parameters_of(model, "Int8Params"))
    if in_eight or ((four or is_loaded_in(model, 4)) and device.type == "cpu"):
        raise PreparationError(
            f"Weights packed by bitsandbytes cannot be sharded in this form; got {type(model).__name__} in "
            f"{'8' if in_eight else '4'} bits on {device.type}. "
            "Load it unpacked, or in 4 bits on a GPU, or train without sharding weights."
        )
    for name, weight in four.items():
        if cast not in (None, weight.dtype) if weight.is_floating_point() else not integers:
            storage = str(cast or torch.float32).removeprefix("torch.")
            raise PreparationError(
                f"Packed weights are bits, which a cast destroys; got {name} stored in {weight.dtype}, where ranks "
                f"gather {cast or 'only floating point formats'}. Load the model with "
                f"bnb_4bit_quant_storage={storage!r}, or use mixed_precision='no', and with FSDP fsdp_version=2."
            )
    found = Channel(world, "prepare: packed weights").exchange(_statistics(four)) if four else ["none"]
    if len(set(found)) > 1 or not found[0]:
        raise PreparationError(
            "Shards of packed weights need the same statistics on all ranks; got ranks that have others, or none. "
            "Load the packed model on every rank, from one checkpoint."
        )


def _parameters_of(model: nn.Module, kind: str) -> dict[str, nn.Parameter]:
    """Return the parameters of a class of bitsandbytes, by name; there are none where nobody imported it."""
    found = imported(f"bitsandbytes.nn:{kind}") or ()
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, found)}


def _statistics(weights: dict[str, nn.Parameter]) -> str:
    """Return a digest of the statistics of 4-bit weights; an empty one where they are not packed, or on no device."""
    states = [None if weight.is_meta else getattr(weight, "quant_state", None) for weight in weights.values()]
    if None in states:
        return ""
    return fingerprint_of(part for state in states if state for part in state.as_dict(packed=True).values())
