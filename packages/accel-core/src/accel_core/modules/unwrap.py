"""The model inside the layers that preparation put around it."""

from __future__ import annotations

from collections.abc import Container
from types import MethodType
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_core.host.availability import imported
from accel_core.modules.compilation import has_compiled_regions, is_compiled_module, like_compiled
from accel_core.options.engines import engines

_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


_registered: list[type[Any]] = [DistributedDataParallel, DataParallel]


def register_container(kind: type[Any]) -> None:
    """Let models be taken out of a class of wrappers, which hold the model as `module`."""
    if kind not in _registered:
        _registered.append(kind)


def _contains(model: object) -> bool:
    """Return whether an object is a wrapper around a model; packages are looked for only where it may be one."""
    return hasattr(model, "module") and isinstance(model, _containers())


def _containers() -> tuple[type[Any], ...]:
    """Return the wrapper classes that are registered, and those of engines that are imported."""
    found = (imported(path) for engine in engines().values() for path in engine.containers)
    return (*_registered, *(kind for kind in found if kind is not None))


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Take a model out of the containers around it.

    Args:
        model: The model, prepared or not.
        keep_fp32_wrapper: Keep the mixed-precision forward that preparation installed.
        keep_torch_compile: Keep the compiled form.
        recursive: Take submodules out of their containers as well, in place.

    Returns:
        The model inside; compiled again if it was, and that is to be kept.

    Examples:
        >>> prepared = accelerator.prepare(model)
        >>> extract_model_from_parallel(prepared) is model
        True
    """
    compiled: Any = None
    regions: Any = None
    while True:
        if is_compiled_module(model):
            compiled, model = model, model._orig_mod
        elif has_compiled_regions(model):
            regions, model = model, model.__dict__["_orig_mod"]
        elif _contains(model):
            model = model.module
        else:
            break
    if recursive:
        _unwrap_children(model)
    if not keep_fp32_wrapper:
        for form in (model, regions):
            _restore_forward(form)
    if keep_torch_compile:
        if compiled is not None:
            # A new form: the compiled model that was given continues training through its container.
            return compiled if compiled._orig_mod is model else like_compiled(compiled, model)
        if regions is not None:
            return regions
    return model


def _unwrap_children(module: torch.nn.Module) -> None:
    for name, child in list(module.named_children()):
        inner: Any = child
        while _contains(inner):
            inner = inner.module
        if inner is not child:
            module._modules[name] = inner
        _unwrap_children(inner)


def _restore_forward(model: torch.nn.Module | None) -> None:
    """Give a model its own forward back."""
    if model is None or "_original_forward" not in model.__dict__:
        return
    original = model.__dict__.pop("_original_forward")
    own = original.__func__ if isinstance(original, MethodType) and original.__self__ is model else None
    if own is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers (compilation, activation checkpointing, FSDP)."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def canonical_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's state dict under the names that the bare model has, whatever wraps it."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return {canonical_name(name): value for name, value in inner.state_dict().items()}


def ddp_of(model: object) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, looking through a compiled form."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def ignored_by_ddp(model: torch.nn.Module) -> Container[str]:
    """Return the names of the parameters and buffers that a model excludes from DDP."""
    return getattr(model, "_ddp_params_and_buffers_to_ignore", ())


def trained_by_ddp(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model that train and that DDP does not ignore, by name."""
    left_out = ignored_by_ddp(model)
    return {name: each for name, each in model.named_parameters() if each.requires_grad and name not in left_out}
