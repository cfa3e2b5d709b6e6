"""The names of `accelerate.utils.environment` in Accelerate, imported from where accel defines them."""

from accel_core.host.affinity import (
    override_numa_affinity,
    set_numa_affinity,
)
from accel_core.host.environ import (
    clear_environment,
    patch_environment,
    str_to_bool,
)
from accelerate._environment import (
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    purge_accelerate_environment,
)
from accelerate._machine import (
    CPUInformation,
    are_libraries_initialized,
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    get_cpu_distributed_information,
    get_current_device_type,
    get_driver_version,
    get_gpu_info,
)
from accelerate._rebinding import write_through

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]

write_through(__name__)
