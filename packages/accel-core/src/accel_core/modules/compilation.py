"""Compiled models: the whole, or only the block that repeats."""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any, cast

import torch

from accel_core.modules.traversal import has_repeated_blocks


def is_compiled_module(module: object) -> bool:
    """Return whether `module` is what `torch.compile` returned."""
    dynamo = sys.modules.get("torch._dynamo")  # compiling imports it
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def like_compiled(compiled: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """Compile `module` with everything that `compiled` was compiled with (backend, mode, options)."""
    # torch keeps the arguments in this context only, and offers no way to apply them again.
    return type(compiled)(module, cast(Any, compiled).dynamo_ctx)


def has_compiled_regions(module: object) -> bool:
    """Return whether `module` came from `compile_regions` and has compiled blocks."""
    return isinstance(module, torch.nn.Module) and "_orig_mod" in module.__dict__


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether `module` itself is a list of blocks of one class."""
    return isinstance(module, torch.nn.ModuleList) and len({type(block) for block in module}) == 1


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile each block of a model's repeated blocks instead of the whole, which takes a fraction of the time.

    Blocks of one class share one compiled form, so a model of fifty equal layers compiles one. The result shares
    parameters and buffers with `module`, which itself stays uncompiled.

    Args:
        module: The model. Without repeated blocks (a `ModuleList` of one class) it is compiled whole.
        **compile_kwargs: Arguments of `torch.compile`.

    Returns:
        A model with the same parameters, buffers and names.

    Examples:
        >>> compiled = compile_regions(model, dynamic=True)
        >>> compiled.head.weight is model.head.weight
        True
    """
    if not has_repeated_blocks(module):
        return cast(torch.nn.Module, torch.compile(module, **compile_kwargs))
    twin = _twin(module, compile_kwargs)
    twin.__dict__["_orig_mod"] = module
    return twin


def compile_regions_in_place(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile each repeated block, and each module beside them, where it stands: the model can still be sharded."""
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_in_place(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
    return module


def _twin(module: torch.nn.Module, compile_kwargs: dict[str, Any]) -> torch.nn.Module:
    """Copy the modules, not their parameters, down to the repeated blocks, and compile those."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, value in module.__dict__.items():
        # A method that somebody put on the object would run the original, which is not compiled.
        if isinstance(value, MethodType) and value.__self__ is module:
            twin.__dict__[name] = MethodType(value.__func__, twin)
    rebind = getattr(twin.__dict__.get("forward"), "of", None)  # a hook's, which would run the module it was put on
    if rebind is not None:
        twin.__dict__["forward"] = rebind(twin)
    blocks = is_repeated_blocks(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if blocks:
            block = copy.copy(child)
            block.compile(**compile_kwargs)
            twin._modules[name] = block
        elif has_repeated_blocks(child):
            twin._modules[name] = _twin(child, compile_kwargs)
    return twin
