"""FSDP version 1, which wraps models; and the files of one model or optimizer of either version.

Its modules are imported when they are first used: they load torch's FSDP, and `import accelerate` needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.strategies.fsdp1 import files

__all__ = ["files"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
