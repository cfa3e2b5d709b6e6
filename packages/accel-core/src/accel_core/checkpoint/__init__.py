"""Checkpoints that survive a kill at any instant and resume exactly.

What saves and loads whole runs is imported when it is first used: a run that does neither starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.checkpoint import background, folder, weights

__all__ = ["background", "folder", "weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
