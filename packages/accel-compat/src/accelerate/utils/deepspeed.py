"""The names of `accelerate.utils.deepspeed` in Accelerate, imported from where accel defines them."""

from accel_core.host.versions import (
    compare_versions,
)
from accel_core.optim.optimizer import (
    AcceleratedOptimizer,
)
from accel_core.optim.scheduler import (
    AcceleratedScheduler,
)
from accel_core.options.enums import (
    DistributedType,
)
from accel_core.plugins.deepspeed import (
    DummyOptim,
    DummyScheduler,
)
from accel_core.plugins.deepspeed_config import (
    HfDeepSpeedConfig,
)
from accelerate._availability import (
    is_bnb_available,
)
from accelerate._engines import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    map_pytorch_optim_to_deepspeed,
)
from accelerate._rebinding import write_through
from accelerate._states import (
    get_active_deepspeed_plugin,
)

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "compare_versions",
    "get_active_deepspeed_plugin",
    "is_bnb_available",
    "map_pytorch_optim_to_deepspeed",
]

write_through(__name__)
