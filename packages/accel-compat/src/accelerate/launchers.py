"""The names of `accelerate.launchers` in Accelerate, imported from where accel defines them."""

from accel_core.host.environ import patch_environment as patch_environment
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.state.process import PartialState as PartialState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding
from accelerate._availability import is_mps_available as is_mps_available
from accelerate._availability import is_rocm_available as is_rocm_available
from accelerate._elastic import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate._machine import are_libraries_initialized as are_libraries_initialized
from accelerate._machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate._machine import get_current_device_type as get_current_device_type
from accelerate._machine import get_gpu_info as get_gpu_info

_LATER = {
    "accel_launch.notebook": [  # what starts processes, of no use in those that were started
        "PrepareForLaunch",
        "debug_launcher",
        "notebook_launcher",
        "test_launch",
    ],
}
_rebinding.write_through(__name__, _LATER)
