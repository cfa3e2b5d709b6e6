"""The names of `accelerate.utils.launch` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.ports import get_free_port as get_free_port
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.options.enums import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate import _rebinding
from accelerate._availability import is_fp8_available as is_fp8_available
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._machine import is_port_in_use as is_port_in_use
from accelerate._merging import merge_dicts as merge_dicts

_LATER = {
    "accel_launch.notebook": [  # what starts processes, of no use in those that were started
        "PrepareForLaunch",
    ],
    "accel_launch.settings.config": [
        "SageMakerConfig",
    ],
    "accelerate._launch_preparation": [  # brings all launchers
        "_convert_nargs_to_dict",
        "env_var_path_add",
        "prepare_deepspeed_cmd_env",
        "prepare_extend_env_parallelism_config",
        "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs",
        "prepare_simple_launcher_cmd_env",
        "prepare_tpu",
        "setup_fp8_env",
    ],
}
_rebinding.write_through(__name__, _LATER)
