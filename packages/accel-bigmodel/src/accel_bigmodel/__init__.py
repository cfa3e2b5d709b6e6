"""Load and run models larger than one device.

A name imports its module, and torch, when it is first used.
"""

from accel_bigmodel._version import __version__
from accel_core._lazy import attach

_NAMES = {
    "accel_bigmodel.checkpoint.load": ["LoadedKeys", "load_checkpoint_in_model", "load_offloaded_weights"],
    "accel_bigmodel.checkpoint.read": ["load_state_dict"],
    "accel_bigmodel.device_map.balance": ["get_balanced_memory"],
    "accel_bigmodel.device_map.check": ["check_device_map", "check_tied_parameters_on_same_device", "clean_device_map"],
    "accel_bigmodel.device_map.infer": ["infer_auto_device_map"],
    "accel_bigmodel.device_map.ties": [
        "check_tied_parameters_in_config",
        "fallback_allocate",
        "get_module_size_with_ties",
    ],
    "accel_bigmodel.dispatch": [
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "load_checkpoint_and_dispatch",
    ],
    "accel_bigmodel.hooks.align": ["AlignDevicesHook"],
    "accel_bigmodel.hooks.attach": [
        "align_module_device",
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
        "has_offloaded_params",
    ],
    "accel_bigmodel.hooks.hook": [
        "ModelHook",
        "SequentialHook",
        "add_hook_to_module",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ],
    "accel_bigmodel.hooks.state": ["get_state_dict_from_offload", "get_state_dict_offloaded_model"],
    "accel_bigmodel.hooks.whole": [
        "CpuOffload",
        "LayerwiseCastingHook",
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "UserCpuOffloadHook",
        "attach_layerwise_casting_hooks",
    ],
    "accel_bigmodel.memory": ["get_max_memory"],
    "accel_bigmodel.meta": ["init_empty_weights", "init_on_device"],
    "accel_bigmodel.offload.store": [
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ],
    "accel_bigmodel.pipeline": ["prepare_pippy"],
    "accel_bigmodel.placement": ["check_device_same", "retie_parameters", "set_module_tensor_to_device"],
    "accel_bigmodel.sizes": [
        "calculate_maximum_sizes",
        "compute_module_sizes",
        "compute_module_total_buffer_size",
        "get_max_layer_size",
        "get_module_leaves",
    ],
    "accel_core.modules.sizes": ["convert_file_size_to_int", "dtype_byte_size", "id_tensor_storage"],
    "accel_core.modules.ties": ["find_tied_parameters"],
    "accel_core.modules.traversal": ["get_non_persistent_buffers", "named_module_tensors"],
}

__getattr__, __dir__, _public = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_public, "__version__"]
