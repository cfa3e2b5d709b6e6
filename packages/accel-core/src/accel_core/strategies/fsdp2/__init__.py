"""Fully sharded data parallelism, version 2: parameters are sharded in place.

Its modules are imported when they are first used: they load torch's FSDP, and `import accelerate` needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.strategies.fsdp2 import in_place

__all__ = ["in_place"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
