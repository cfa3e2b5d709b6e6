"""Packed weights written to an offload folder."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel import offload_weight, set_module_tensor_to_device
from accel_bigmodel.hooks.residency import packed_key
from accel_bigmodel.placement import as_device
from accel_core.errors import QuantizationError
from accel_core.modules import packed
from accel_core.modules.traversal import owner_of
from accel_quant.device_map import default_device


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: MutableMapping[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Pack one weight to 8 bits, write weight and scales to an offload folder, and leave it empty in the model.

    Raises:
        QuantizationError: The name is of no packed weight, or the weight does not fit.
    """
    owner, leaf = owner_of(model, param_name)
    place = owner._parameters.get(leaf)
    form = None if place is None else packed.find(place)
    if form is None or place is None:
        raise QuantizationError(
            f"{param_name} is not a packed weight of the model; got {type(place).__name__}. Replace the layers first "
            "with replace_with_bnb_layers."
        )
    value = param.to(new_dtype) if param.is_floating_point() else param
    made = form.pack(place, value, as_device(default_device()), statistics=fp16_statistics)
    write_parts(form, made, param_name, offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta")
    owner._parameters[leaf] = form.move(made, torch.device("meta"))


def write_parts(
    form: packed.PackedParameter,
    parameter: nn.Parameter,
    name: str,
    offload_folder: str | os.PathLike[str],
    offload_index: MutableMapping[str, Any],
) -> None:
    """Write the parts of a packed weight to an offload folder."""
    for suffix, part in form.unpack(parameter).items():
        offload_weight(part, packed_key(name, suffix), offload_folder, index=offload_index)
