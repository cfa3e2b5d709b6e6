"""Plan before you load or train: which device holds which part of a model, and the memory of a training step.

A name imports its module, and torch, when it is first used.
"""

from accel_core._lazy import attach
from accel_plan._version import __version__

_NAMES = {
    "accel_plan.device_map": ["Plan", "plan_device_map"],
    "accel_plan.headroom": ["Workload"],
}

__getattr__, __dir__, _public = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_public, "__version__"]
