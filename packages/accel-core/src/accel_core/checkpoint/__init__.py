"""Checkpoints that survive a kill at any instant and resume exactly.

What saves and loads whole runs is imported when it is first used: a run that does neither starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach

if TYPE_CHECKING:
    from accel_core.checkpoint import background, load, save, weights

__all__ = ["background", "load", "save", "weights"]

__getattr__ = attach(__name__, dict.fromkeys(__all__, __name__))[0]
