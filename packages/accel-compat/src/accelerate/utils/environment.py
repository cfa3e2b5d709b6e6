"""The names of `accelerate.utils.environment` in Accelerate, imported from where accel defines them."""

from accel_core.host.affinity import override_numa_affinity as override_numa_affinity
from accel_core.host.affinity import set_numa_affinity as set_numa_affinity
from accel_core.host.environ import clear_environment as clear_environment
from accel_core.host.environ import patch_environment as patch_environment
from accel_core.host.environ import str_to_bool as str_to_bool
from accelerate import _rebinding
from accelerate._environment import convert_dict_to_env_variables as convert_dict_to_env_variables
from accelerate._environment import get_int_from_env as get_int_from_env
from accelerate._environment import parse_choice_from_env as parse_choice_from_env
from accelerate._environment import parse_flag_from_env as parse_flag_from_env
from accelerate._environment import purge_accelerate_environment as purge_accelerate_environment
from accelerate._machine import CPUInformation as CPUInformation
from accelerate._machine import are_libraries_initialized as are_libraries_initialized
from accelerate._machine import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate._machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate._machine import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate._machine import get_current_device_type as get_current_device_type
from accelerate._machine import get_driver_version as get_driver_version
from accelerate._machine import get_gpu_info as get_gpu_info

_rebinding.write_through(__name__)
