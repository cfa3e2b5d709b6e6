"""The names of `accelerate.launchers` in Accelerate, imported from where accel defines them."""

from accel_core.host.environ import (
    patch_environment,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.options.enums import (
    PrecisionType,
)
from accel_core.state.process import (
    PartialState,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accel_launch.notebook import (
    PrepareForLaunch,
    debug_launcher,
    notebook_launcher,
    test_launch,
)
from accelerate._availability import (
    is_mps_available,
    is_rocm_available,
)
from accelerate._elastic import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate._machine import (
    are_libraries_initialized,
    check_cuda_p2p_ib_support,
    get_current_device_type,
    get_gpu_info,
)
from accelerate._rebinding import write_through

__all__ = [
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "AcceleratorState",
    "PartialState",
    "PrecisionType",
    "PrepareForLaunch",
    "are_libraries_initialized",
    "check_cuda_p2p_ib_support",
    "debug_launcher",
    "get_current_device_type",
    "get_gpu_info",
    "is_mps_available",
    "is_rocm_available",
    "is_torch_version",
    "notebook_launcher",
    "patch_environment",
    "test_launch",
]

write_through(__name__)
