"""The names of `accelerate.commands.launch` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_deepspeed_available,
    is_hpu_available,
)
from accel_core.host.environ import (
    patch_environment,
    str_to_bool,
)
from accel_core.options.compilation import (
    TORCH_DYNAMO_MODES,
)
from accel_core.options.enums import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    ComputeEnvironment,
    DistributedType,
)
from accel_launch.arguments import (
    HelpFormatter as CustomHelpFormatter,
)
from accel_launch.commands.launch import (
    launch_command_parser,
)
from accel_launch.notebook import (
    PrepareForLaunch,
)
from accel_launch.settings.config import (
    SageMakerConfig,
    load_config_from_file,
)
from accelerate._availability import (
    is_bf16_available,
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_rich_available,
    is_sagemaker_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_xpu_available,
)
from accelerate._command_functions import (
    deepspeed_launcher,
    launch_command,
    multi_gpu_launcher,
    sagemaker_launcher,
    simple_launcher,
    tpu_launcher,
    tpu_pod_launcher,
)
from accelerate._commands import (
    DYNAMO_BACKENDS,
    clean_option,
    default_config_file,
    options_to_group,
)
from accelerate._commands import (
    main_launch as main,
)
from accelerate._environment import (
    convert_dict_to_env_variables,
    get_int_from_env,
)
from accelerate._launch_preparation import (
    _validate_launch_command as _validate_launch_command,
)
from accelerate._launch_preparation import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accelerate._machine import (
    check_cuda_p2p_ib_support,
)
from accelerate._rebinding import write_through

__all__ = [
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DYNAMO_BACKENDS",
    "TORCH_DYNAMO_MODES",
    "ComputeEnvironment",
    "CustomHelpFormatter",
    "DistributedType",
    "PrepareForLaunch",
    "SageMakerConfig",
    "check_cuda_p2p_ib_support",
    "clean_option",
    "convert_dict_to_env_variables",
    "deepspeed_launcher",
    "default_config_file",
    "get_int_from_env",
    "is_bf16_available",
    "is_deepspeed_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_rich_available",
    "is_sagemaker_available",
    "is_sdaa_available",
    "is_torch_xla_available",
    "is_xpu_available",
    "launch_command",
    "launch_command_parser",
    "load_config_from_file",
    "main",
    "multi_gpu_launcher",
    "options_to_group",
    "patch_environment",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "sagemaker_launcher",
    "simple_launcher",
    "str_to_bool",
    "tpu_launcher",
    "tpu_pod_launcher",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
