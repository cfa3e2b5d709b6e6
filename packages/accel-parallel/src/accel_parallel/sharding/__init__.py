"""What both versions of fully sharded data parallelism share.

Its modules are imported when they are first used: they load torch's FSDP, and `import accelerate` needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach

if TYPE_CHECKING:
    from accel_parallel.sharding import loading, mesh, param_attrs, recomputing, wrapping

__all__ = ["loading", "mesh", "param_attrs", "recomputing", "wrapping"]

__getattr__ = attach(__name__, dict.fromkeys(__all__, __name__))[0]
