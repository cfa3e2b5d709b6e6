"""The names of `accelerate.utils.fsdp_utils` in Accelerate, imported from where accel defines them."""

from accel_core.checkpoint.names import (
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)
from accel_core.checkpoint.plain import (
    save,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.modules.compilation import (
    is_compiled_module,
)
from accel_core.modules.traversal import (
    get_non_persistent_buffers,
)
from accel_core.options.fsdp import (
    FSDP_MODEL_NAME,
)
from accel_core.plugins.fsdp import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    get_module_class_from_name,
)
from accelerate._fsdp import (
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    get_parameters_from_modules,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accelerate._models import (
    get_module_children_bottom_up,
    is_peft_model,
)
from accelerate._rebinding import write_through
from accelerate._weights_merging import (
    merge_fsdp_weights,
)

__all__ = [
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_NAME",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_logger",
    "get_module_children_bottom_up",
    "get_module_class_from_name",
    "get_non_persistent_buffers",
    "get_parameters_from_modules",
    "is_compiled_module",
    "is_peft_model",
    "is_torch_version",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

write_through(__name__)
