"""The names of `accelerate.utils.random` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_hpu_available,
)
from accel_core.options.enums import (
    CUDA_DISTRIBUTED_TYPES,
    DistributedType,
    RNGType,
)
from accel_core.random import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accelerate._availability import (
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_xpu_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "CUDA_DISTRIBUTED_TYPES",
    "AcceleratorState",
    "DistributedType",
    "RNGType",
    "is_hpu_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_torch_xla_available",
    "is_xpu_available",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

write_through(__name__)
