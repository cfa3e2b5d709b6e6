"""The names of `accelerate.utils.memory` in Accelerate, imported from where accel defines them."""

from accel_core.devices.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from accel_core.host.availability import (
    is_cuda_available,
    is_hpu_available,
)
from accelerate._availability import (
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "is_cuda_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_xpu_available",
    "release_memory",
    "should_reduce_batch_size",
]

write_through(__name__)
