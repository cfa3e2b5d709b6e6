"""Fully sharded data parallelism, version 2: parameters are sharded in place.

Its modules are imported when they are first used: they load torch's FSDP, and `import accelerate` needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach

if TYPE_CHECKING:
    from accel_parallel.fsdp2 import in_place

__all__ = ["in_place"]

__getattr__ = attach(__name__, dict.fromkeys(__all__, __name__))[0]
