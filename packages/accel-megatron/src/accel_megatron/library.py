"""The library megatron-core, imported when its groups are made."""

from __future__ import annotations

import importlib
from types import ModuleType

from accel_core.host import availability


def core(name: str) -> ModuleType:
    """Import a module of megatron-core."""
    return importlib.import_module(f"megatron.core.{name}" if name else "megatron.core")


def has_transformer_engine() -> bool:
    """Return whether megatron-core can build Transformer Engine layers here."""
    return availability.has_library("transformer_engine")


def training_arguments() -> ModuleType | None:
    """Return the module of arguments in Megatron-LM's source tree; `None` if only megatron-core is installed."""
    if not availability.has_module("megatron.training"):
        return None
    return importlib.import_module("megatron.training.arguments")
