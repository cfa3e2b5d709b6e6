"""Replicas of a run that come and go: torchft as an engine of accel.

Importing this package loads nothing; a name brings its module, and torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach
from accel_torchft._version import __version__

if TYPE_CHECKING:
    from accel_torchft.kwargs import FaultToleranceKwargs as FaultToleranceKwargs
    from accel_torchft.replicas import Replicas as Replicas

_NAMES = {"accel_torchft.kwargs": ["FaultToleranceKwargs"], "accel_torchft.replicas": ["Replicas"]}

__getattr__, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_all, "__version__"]
