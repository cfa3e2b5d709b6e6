"""The names of `accelerate.utils.deepspeed` in Accelerate, imported from where accel defines them."""

from accel_core.host.versions import compare_versions as compare_versions
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.plugins.deepspeed import DummyOptim as DummyOptim
from accel_core.plugins.deepspeed import DummyScheduler as DummyScheduler
from accel_core.plugins.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel_core.strategies.deepspeed.engines import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel_core.strategies.deepspeed.engines import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accel_core.strategies.deepspeed.engines import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accel_core.strategies.deepspeed.optimizers import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate import _rebinding
from accelerate._availability import is_bnb_available as is_bnb_available
from accelerate._states import get_active_deepspeed_plugin as get_active_deepspeed_plugin

_rebinding.write_through(__name__)
