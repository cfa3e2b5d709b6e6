"""The names of `accelerate.utils.random` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import RNGType as RNGType
from accel_core.random import set_seed as set_seed
from accel_core.random import synchronize_rng_state as synchronize_rng_state
from accel_core.random import synchronize_rng_states as synchronize_rng_states
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES

_rebinding.write_through(__name__)
