"""The library megatron-core: found before a run starts, imported when its groups are made."""

from __future__ import annotations

import importlib
from types import ModuleType

from accel_core.errors import MissingDependencyError
from accel_core.host import availability, versions

__all__ = ["core", "has_transformer_engine", "require", "training_arguments"]

_OLDEST = "0.16.0"
_INSTALL = "Run `pip install 'accel-core[megatron]'`."


def require() -> None:
    """Refuse a run with Megatron where megatron-core is not installed, without importing it.

    Raises:
        MissingDependencyError: It is not installed, or is too old.
    """
    if not availability.is_megatron_core_available():
        raise MissingDependencyError(
            f"This run asks for Megatron-LM, whose engine stands on megatron-core; got no library of that name. "
            f"{_INSTALL}"
        )
    if versions.compare_versions("megatron-core", "<", _OLDEST):
        found = versions.installed_version("megatron-core")
        raise MissingDependencyError(f"The engine stands on megatron-core {_OLDEST} or newer; got {found}. {_INSTALL}")


def core(name: str) -> ModuleType:
    """Import a module of megatron-core.

    Args:
        name: Its name below `megatron.core`; empty for that itself.
    """
    return importlib.import_module(f"megatron.core.{name}" if name else "megatron.core")


def has_transformer_engine() -> bool:
    """Return whether megatron-core builds layers of Transformer Engine here."""
    return availability.has_library("transformer_engine")


def training_arguments() -> ModuleType | None:
    """Import the arguments of Megatron-LM's source tree; `None` where only megatron-core is installed."""
    if not availability.has_module("megatron.training"):
        return None
    return importlib.import_module("megatron.training.arguments")
