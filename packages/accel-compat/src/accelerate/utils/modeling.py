"""The names of `accelerate.utils.modeling` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import (
    load_checkpoint_in_model,
    load_offloaded_weights,
)
from accel_bigmodel.checkpoint.read import (
    load_state_dict,
)
from accel_bigmodel.device_map.balance import (
    get_balanced_memory,
)
from accel_bigmodel.device_map.check import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
)
from accel_bigmodel.device_map.infer import (
    infer_auto_device_map,
)
from accel_bigmodel.device_map.ties import (
    check_tied_parameters_in_config,
    fallback_allocate,
    get_module_size_with_ties,
)
from accel_bigmodel.hooks.attach import (
    align_module_device,
    has_offloaded_params,
)
from accel_bigmodel.hooks.state import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
)
from accel_bigmodel.memory import (
    get_max_memory,
)
from accel_bigmodel.offload.store import (
    load_offloaded_weight,
    offload_weight,
    save_offload_index,
)
from accel_bigmodel.placement import (
    check_device_same,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_leaves,
)
from accel_core.checkpoint.names import (
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from accel_core.devices.memory import (
    clear_device_cache,
)
from accel_core.host.availability import (
    is_hpu_available,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.modules.sizes import (
    convert_file_size_to_int,
    dtype_byte_size,
    id_tensor_storage,
)
from accel_core.modules.ties import (
    find_tied_parameters,
)
from accel_core.modules.traversal import (
    get_non_persistent_buffers,
    named_module_tensors,
)
from accel_core.options.enums import (
    CustomDtype,
    DistributedType,
)
from accel_core.plugins.handlers import (
    AutocastKwargs,
)
from accel_core.precision.scaler import (
    get_grad_scaler,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accel_core.tqdm import (
    tqdm,
)
from accelerate._availability import (
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_npu_available,
    is_peft_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_tqdm_available,
    is_xpu_available,
)
from accelerate._models import (
    is_peft_model,
)
from accelerate._precision import (
    get_mixed_precision_context_manager,
)
from accelerate._rebinding import write_through

__all__ = [
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AcceleratorState",
    "AutocastKwargs",
    "CustomDtype",
    "DistributedType",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "clear_device_cache",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_hpu_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_npu_available",
    "is_peft_available",
    "is_peft_model",
    "is_sdaa_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_tqdm_available",
    "is_xpu_available",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_weight",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
    "tqdm",
]

write_through(__name__)
