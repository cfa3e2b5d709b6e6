"""The names of accelerate.utils.deepspeed, which are imported when they are first used. Written by `nox -s stubs`."""

from accel_core.host.versions import compare_versions as compare_versions
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.options.enums import DistributedType as DistributedType
from accel_deepspeed import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel_deepspeed import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accel_deepspeed import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accel_deepspeed import DummyOptim as DummyOptim
from accel_deepspeed import DummyScheduler as DummyScheduler
from accel_deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel_deepspeed import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from accelerate._availability import is_bnb_available as is_bnb_available
from accelerate._states import get_active_deepspeed_plugin as get_active_deepspeed_plugin
