"""The names of accelerate.launchers, which are imported when they are first used. Written by `nox -s stubs`."""

from accel_core.host.environ import patch_environment as patch_environment
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.state.process import PartialState as PartialState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accel_launch.notebook import PrepareForLaunch as PrepareForLaunch
from accel_launch.notebook import debug_launcher as debug_launcher
from accel_launch.notebook import notebook_launcher as notebook_launcher
from accel_launch.notebook import test_launch as test_launch
from accelerate._availability import is_mps_available as is_mps_available
from accelerate._availability import is_rocm_available as is_rocm_available
from accelerate._elastic import ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION
from accelerate._machine import are_libraries_initialized as are_libraries_initialized
from accelerate._machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate._machine import get_current_device_type as get_current_device_type
from accelerate._machine import get_gpu_info as get_gpu_info
