"""The names of `accelerate.utils.launch` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_hpu_available,
)
from accel_core.host.environ import (
    str_to_bool,
)
from accel_core.host.ports import (
    get_free_port,
)
from accel_core.host.versions import (
    compare_versions,
)
from accel_core.options.deepspeed import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
)
from accel_core.options.enums import (
    DistributedType,
    DynamoBackend,
    PrecisionType,
    SageMakerDistributedType,
)
from accel_launch.notebook import (
    PrepareForLaunch,
)
from accel_launch.settings.config import (
    SageMakerConfig,
)
from accelerate._availability import (
    is_fp8_available,
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_xpu_available,
)
from accelerate._launch_preparation import (
    _convert_nargs_to_dict as _convert_nargs_to_dict,
)
from accelerate._launch_preparation import (
    env_var_path_add,
    prepare_deepspeed_cmd_env,
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
    setup_fp8_env,
)
from accelerate._machine import (
    is_port_in_use,
)
from accelerate._merging import (
    merge_dicts,
)
from accelerate._rebinding import write_through

__all__ = [
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DistributedType",
    "DynamoBackend",
    "PrecisionType",
    "PrepareForLaunch",
    "SageMakerConfig",
    "SageMakerDistributedType",
    "compare_versions",
    "env_var_path_add",
    "get_free_port",
    "is_fp8_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_port_in_use",
    "is_sdaa_available",
    "is_torch_xla_available",
    "is_xpu_available",
    "merge_dicts",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
    "str_to_bool",
]

write_through(__name__)
