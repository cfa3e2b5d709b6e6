"""DeepSpeed as an engine of accel: one of its engines for each model that is trained, behind `prepare`.

Importing this package loads nothing; a name imports its module, and torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach
from accel_deepspeed._version import __version__

if TYPE_CHECKING:
    from accel_deepspeed.engines import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
    from accel_deepspeed.engines import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
    from accel_deepspeed.engines import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
    from accel_deepspeed.optimizers import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
    from accel_deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_deepspeed.plugin_config import HfDeepSpeedConfig as HfDeepSpeedConfig
    from accel_deepspeed.stand_ins import DummyOptim as DummyOptim
    from accel_deepspeed.stand_ins import DummyScheduler as DummyScheduler

_NAMES = {
    "accel_deepspeed.engines": ["DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"],
    "accel_deepspeed.optimizers": ["map_pytorch_optim_to_deepspeed"],
    "accel_deepspeed.plugin": ["DeepSpeedPlugin"],
    "accel_deepspeed.plugin_config": ["HfDeepSpeedConfig"],
    "accel_deepspeed.stand_ins": ["DummyOptim", "DummyScheduler"],
}

__getattr__, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_all, "__version__"]
