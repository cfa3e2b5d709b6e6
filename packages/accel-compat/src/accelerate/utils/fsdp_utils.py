"""The names of `accelerate.utils.fsdp_utils` in Accelerate, imported from where accel defines them."""

from accel_core.checkpoint.names import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_core.checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_core.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accel_core.checkpoint.plain import save as save
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.logging import get_logger as get_logger
from accel_core.modules.compilation import is_compiled_module as is_compiled_module
from accel_core.modules.traversal import get_non_persistent_buffers as get_non_persistent_buffers
from accel_core.plugins.blocks import get_module_class_from_name as get_module_class_from_name
from accel_parallel.plugin import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from accel_parallel.plugin import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from accelerate import _rebinding
from accelerate._fsdp import ensure_weights_retied as ensure_weights_retied
from accelerate._fsdp import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate._fsdp import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate._fsdp import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate._fsdp import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from accelerate._fsdp import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate._fsdp import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accelerate._fsdp import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate._fsdp import get_parameters_from_modules as get_parameters_from_modules
from accelerate._fsdp import load_fsdp_model as load_fsdp_model
from accelerate._fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate._fsdp import save_fsdp_model as save_fsdp_model
from accelerate._fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from accelerate._models import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate._models import is_peft_model as is_peft_model

_LATER = {
    "accelerate._weights_merging": [  # brings the readers of shards
        "merge_fsdp_weights",
    ],
}
_rebinding.write_through(__name__, _LATER)
