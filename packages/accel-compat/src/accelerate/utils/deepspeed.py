"""The names of `accelerate.utils.deepspeed` in Accelerate, imported from where accel defines them."""

from accel_core.host.versions import compare_versions as compare_versions
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.options.enums import DistributedType as DistributedType
from accelerate import _rebinding
from accelerate._availability import is_bnb_available as is_bnb_available
from accelerate._states import get_active_deepspeed_plugin as get_active_deepspeed_plugin

_LATER = {
    "accel_deepspeed": [  # an engine that may not be installed
        "DeepSpeedEngineWrapper",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedSchedulerWrapper",
        "DummyOptim",
        "DummyScheduler",
        "HfDeepSpeedConfig",
        "map_pytorch_optim_to_deepspeed",
    ],
}
_rebinding.write_through(__name__, _LATER)
