"""The names of `accelerate.state` in Accelerate, imported from where accel defines them."""

from accel_core.host.affinity import (
    set_numa_affinity,
)
from accel_core.host.availability import (
    is_deepspeed_available,
    is_hpu_available,
)
from accel_core.options.enums import (
    DistributedType,
    DynamoBackend,
    SageMakerDistributedType,
)
from accel_core.plugins.accumulation import (
    GradientAccumulationPlugin,
)
from accel_core.state.gradient import (
    GradientState,
)
from accel_core.state.process import (
    PartialState,
    do_nothing,
)
from accel_core.state.run import (
    AcceleratorState,
    is_initialized,
)
from accelerate._availability import (
    deepspeed_required,
    is_datasets_available,
    is_fp8_available,
    is_habana_gaudi1,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_xccl_available,
    is_xpu_available,
)
from accelerate._environment import (
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
)
from accelerate._machine import (
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    get_cpu_distributed_information,
)
from accelerate._rebinding import write_through
from accelerate._states import (
    ThreadLocalSharedDict,
)

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "DynamoBackend",
    "GradientAccumulationPlugin",
    "GradientState",
    "PartialState",
    "SageMakerDistributedType",
    "ThreadLocalSharedDict",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "deepspeed_required",
    "do_nothing",
    "get_cpu_distributed_information",
    "get_int_from_env",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp8_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_initialized",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_torch_xla_available",
    "is_xccl_available",
    "is_xpu_available",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "set_numa_affinity",
]

write_through(__name__)
