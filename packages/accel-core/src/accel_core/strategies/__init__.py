"""How models, optimizers and gradients live across processes: one file or folder per way.

`fsdp_files` is imported when it is first used: it loads torch's FSDP and its checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach_modules

if TYPE_CHECKING:
    from accel_core.strategies import fsdp_files

__all__ = ["fsdp_files"]

__getattr__ = attach_modules(__name__, __all__)
