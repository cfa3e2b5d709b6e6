"""The names of `accelerate.utils.other` in Accelerate, imported from where accel defines them."""

from codecs import encode as encode

from accel_core.checkpoint.pickles import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accel_core.checkpoint.plain import load as load
from accel_core.checkpoint.plain import save as save
from accel_core.comm.collectives import reduce as reduce
from accel_core.host.availability import is_deepspeed_available as is_deepspeed_available
from accel_core.host.ports import get_free_port as get_free_port
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.logging import get_logger as get_logger
from accel_core.modules.compilation import compile_regions as compile_regions
from accel_core.modules.compilation import has_compiled_regions as has_compiled_regions
from accel_core.modules.compilation import is_compiled_module as is_compiled_module
from accel_core.modules.compilation import is_repeated_blocks as is_repeated_blocks
from accel_core.modules.sizes import id_tensor_storage as id_tensor_storage
from accel_core.modules.traversal import has_repeated_blocks as has_repeated_blocks
from accel_core.modules.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.precision.fp8.transformer_engine import convert_model as convert_model
from accel_core.state.process import PartialState as PartialState
from accel_core.state.process import wait_for_everyone as wait_for_everyone
from accel_parallel.options import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate import _rebinding
from accelerate._availability import is_numpy_available as is_numpy_available
from accelerate._availability import is_torch_distributed_available as is_torch_distributed_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_weights_only_available as is_weights_only_available
from accelerate._deepspeed import compile_regions_deepspeed as compile_regions_deepspeed
from accelerate._fsdp import compile_regions_fsdp2 as compile_regions_fsdp2
from accelerate._kernel import check_os_kernel as check_os_kernel
from accelerate._machine import convert_bytes as convert_bytes
from accelerate._machine import is_port_in_use as is_port_in_use
from accelerate._merging import merge_dicts as merge_dicts
from accelerate._models import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accelerate._models import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate._names import get_pretty_name as get_pretty_name
from accelerate._names import recursive_getattr as recursive_getattr
from accelerate._sharded_models import get_model_tp_size as get_model_tp_size
from accelerate._sharded_models import model_has_dtensor as model_has_dtensor

_LATER = {
    "accel_launch.settings.config": [  # reads and writes YAML
        "write_basic_config",
    ],
}
_rebinding.write_through(__name__, _LATER)
