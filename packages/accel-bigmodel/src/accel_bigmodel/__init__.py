"""Load and run models larger than one device."""

from accel_bigmodel._version import __version__
from accel_bigmodel.checkpoint.load import LoadedKeys, load_checkpoint_in_model, load_offloaded_weights
from accel_bigmodel.checkpoint.read import load_state_dict
from accel_bigmodel.device_map.balance import get_balanced_memory
from accel_bigmodel.device_map.check import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
)
from accel_bigmodel.device_map.infer import infer_auto_device_map
from accel_bigmodel.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.attach import (
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    has_offloaded_params,
)
from accel_bigmodel.hooks.casting import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    LayerwiseCastingHook,
    attach_layerwise_casting_hooks,
)
from accel_bigmodel.hooks.cpu_offload import CpuOffload, UserCpuOffloadHook
from accel_bigmodel.hooks.hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.meta import init_empty_weights, init_on_device
from accel_bigmodel.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_bigmodel.placement import check_device_same, retie_parameters, set_module_tensor_to_device
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_leaves,
)
from accel_core.modules.sizes import convert_file_size_to_int, dtype_byte_size, id_tensor_storage
from accel_core.modules.ties import find_tied_parameters
from accel_core.modules.traversal import get_non_persistent_buffers, named_module_tensors

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "LoadedKeys",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "__version__",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]
