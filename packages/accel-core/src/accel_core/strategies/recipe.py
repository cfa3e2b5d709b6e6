"""Compilation, as `Strategy.prepare_model` does it: of blocks before a model is distributed, of the whole after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from accel_core.modules.compilation import (
    compile_regions,
    compile_regions_in_place,
    has_compiled_regions,
    is_compiled_module,
    like_compiled,
)
from accel_core.options.enums import DynamoBackend
from accel_core.plugins.compilation import TorchDynamoPlugin


def inside(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a compiled one; a module that was not compiled is returned unchanged."""
    return cast(torch.nn.Module, model._orig_mod) if is_compiled_module(model) else model


def compile_blocks(model: torch.nn.Module, settings: TorchDynamoPlugin) -> torch.nn.Module:
    """Compile the repeated blocks of a model, if the run compiles by region."""
    if settings.backend == DynamoBackend.NO or not settings.use_regional_compilation or has_compiled_regions(model):
        return model
    return compile_regions(model, **settings.to_kwargs())


def compile_in_place(blocks: Iterable[torch.nn.Module], settings: TorchDynamoPlugin) -> None:
    """Compile modules in place, if the run compiles by region: sharding changes them in place too."""
    if settings.backend != DynamoBackend.NO and settings.use_regional_compilation:
        for block in blocks:
            block.compile(**settings.to_kwargs())


def compile_blocks_in_place(model: torch.nn.Module, settings: TorchDynamoPlugin) -> None:
    """Compile the repeated blocks of a model in place, if the run compiles by region."""
    if settings.backend != DynamoBackend.NO and settings.use_regional_compilation:
        compile_regions_in_place(model, **settings.to_kwargs())


def compile_whole(model: torch.nn.Module, settings: TorchDynamoPlugin) -> torch.nn.Module:
    """Compile a model, if the run compiles whole models."""
    if settings.backend == DynamoBackend.NO or settings.use_regional_compilation or is_compiled_module(model):
        return model
    return cast(torch.nn.Module, torch.compile(model, **settings.to_kwargs()))


def keep_compiled(given: torch.nn.Module, prepared: torch.nn.Module, forward_before: object) -> torch.nn.Module:
    """Compile the prepared form of a compiled model as the user had compiled it."""
    if prepared is given._orig_mod and prepared.__dict__.get("forward") is forward_before:
        return given
    return like_compiled(given, prepared)
