"""The names of `accelerate.utils.memory` in Accelerate, imported from where accel defines them."""

from accel_core.devices.memory import clear_device_cache as clear_device_cache
from accel_core.devices.memory import find_executable_batch_size as find_executable_batch_size
from accel_core.devices.memory import release_memory as release_memory
from accel_core.devices.memory import should_reduce_batch_size as should_reduce_batch_size
from accel_core.host.availability import is_cuda_available as is_cuda_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_mps_available as is_mps_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_xpu_available as is_xpu_available

_rebinding.write_through(__name__)
