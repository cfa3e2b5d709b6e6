"""The names of `accelerate.commands.config.cluster` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_deepspeed_available,
    is_hpu_available,
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
    is_transformers_available,
)
from accel_core.options.compilation import (
    TORCH_DYNAMO_MODES,
)
from accel_core.options.enums import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    ComputeEnvironment,
    DistributedType,
)
from accel_launch.settings.config import (
    ClusterConfig,
)
from accel_parallel.options import (
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate._availability import (
    is_fp8_available,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)
from accelerate._command_functions import (
    get_cluster_input,
)
from accelerate._commands import (
    DYNAMO_BACKENDS,
)
from accelerate._rebinding import write_through

__all__ = [
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DYNAMO_BACKENDS",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "TORCH_DYNAMO_MODES",
    "ClusterConfig",
    "ComputeEnvironment",
    "DistributedType",
    "get_cluster_input",
    "is_deepspeed_available",
    "is_fp8_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_torchao_available",
    "is_transformer_engine_available",
    "is_transformers_available",
    "is_xpu_available",
]

write_through(__name__)
