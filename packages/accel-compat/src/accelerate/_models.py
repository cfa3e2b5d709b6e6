"""What Accelerate asks of models and their state, and accel itself does not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from accel_core.checkpoint import tensor_file
from accel_core.modules.unwrap import extract_model_from_parallel


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict that safetensors can hold: each piece of memory under its first name, all contiguous."""
    kept: dict[tuple[Any, ...], str] = {}
    cleaned: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if kept.setdefault(tensor_file.storage_key(tensor), name) == name:  # safetensors refuses memory under two names
            shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
            cleaned[name] = tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()
    return cleaned


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = False) -> list[nn.Module]: ...


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[True]) -> list[tuple[str, nn.Module]]: ...


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """List every module of a model, or its name and it, children before their parents and the model itself last.

    A module that is registered under two names is listed under both.
    """
    ordered: list[tuple[str, nn.Module]] = []
    stack: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, children_done = stack.pop()
        if children_done:
            ordered.append((name, module))
            continue
        stack.append((name, module, True))
        prefix = f"{name}." if name else ""
        stack.extend(
            (prefix + child_name, child, False)
            for child_name, child in reversed(module._modules.items())  # a stack takes the last first
            if child is not None
        )
    return ordered if return_fqns else [module for _, module in ordered]


def is_peft_model(model: object) -> bool:
    """Return whether a model, prepared or not, is one of peft's."""
    peft = sys.modules.get("peft")
    # Not imported, it made no model.
    return peft is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)
