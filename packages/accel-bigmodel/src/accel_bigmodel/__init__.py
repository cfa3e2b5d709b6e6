"""Load and run models larger than one device.

A name imports its module, and torch, when it is first used.
"""

from typing import TYPE_CHECKING

from accel_bigmodel._version import __version__
from accel_core._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.checkpoint.load import (
        LoadedKeys as LoadedKeys,
    )
    from accel_bigmodel.checkpoint.load import (
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from accel_bigmodel.checkpoint.load import (
        load_offloaded_weights as load_offloaded_weights,
    )
    from accel_bigmodel.checkpoint.read import (
        load_state_dict as load_state_dict,
    )
    from accel_bigmodel.device_map.balance import (
        get_balanced_memory as get_balanced_memory,
    )
    from accel_bigmodel.device_map.check import (
        check_device_map as check_device_map,
    )
    from accel_bigmodel.device_map.check import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from accel_bigmodel.device_map.check import (
        clean_device_map as clean_device_map,
    )
    from accel_bigmodel.device_map.headroom import (
        Workload as Workload,
    )
    from accel_bigmodel.device_map.infer import (
        infer_auto_device_map as infer_auto_device_map,
    )
    from accel_bigmodel.device_map.result import (
        Plan as Plan,
    )
    from accel_bigmodel.device_map.result import (
        plan_device_map as plan_device_map,
    )
    from accel_bigmodel.device_map.ties import (
        check_tied_parameters_in_config as check_tied_parameters_in_config,
    )
    from accel_bigmodel.device_map.ties import (
        fallback_allocate as fallback_allocate,
    )
    from accel_bigmodel.device_map.ties import (
        get_module_size_with_ties as get_module_size_with_ties,
    )
    from accel_bigmodel.dispatch import (
        cpu_offload as cpu_offload,
    )
    from accel_bigmodel.dispatch import (
        cpu_offload_with_hook as cpu_offload_with_hook,
    )
    from accel_bigmodel.dispatch import (
        disk_offload as disk_offload,
    )
    from accel_bigmodel.dispatch import (
        dispatch_model as dispatch_model,
    )
    from accel_bigmodel.dispatch import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from accel_bigmodel.hooks.align import (
        AlignDevicesHook as AlignDevicesHook,
    )
    from accel_bigmodel.hooks.attach import (
        align_module_device as align_module_device,
    )
    from accel_bigmodel.hooks.attach import (
        attach_align_device_hook as attach_align_device_hook,
    )
    from accel_bigmodel.hooks.attach import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from accel_bigmodel.hooks.attach import (
        attach_execution_device_hook as attach_execution_device_hook,
    )
    from accel_bigmodel.hooks.attach import (
        has_offloaded_params as has_offloaded_params,
    )
    from accel_bigmodel.hooks.casting import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    )
    from accel_bigmodel.hooks.casting import (
        LayerwiseCastingHook as LayerwiseCastingHook,
    )
    from accel_bigmodel.hooks.casting import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )
    from accel_bigmodel.hooks.cpu_offload import (
        CpuOffload as CpuOffload,
    )
    from accel_bigmodel.hooks.cpu_offload import (
        UserCpuOffloadHook as UserCpuOffloadHook,
    )
    from accel_bigmodel.hooks.hook import (
        ModelHook as ModelHook,
    )
    from accel_bigmodel.hooks.hook import (
        SequentialHook as SequentialHook,
    )
    from accel_bigmodel.hooks.hook import (
        add_hook_to_module as add_hook_to_module,
    )
    from accel_bigmodel.hooks.hook import (
        remove_hook_from_module as remove_hook_from_module,
    )
    from accel_bigmodel.hooks.hook import (
        remove_hook_from_submodules as remove_hook_from_submodules,
    )
    from accel_bigmodel.hooks.state import (
        get_state_dict_from_offload as get_state_dict_from_offload,
    )
    from accel_bigmodel.hooks.state import (
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    )
    from accel_bigmodel.memory import (
        get_max_memory as get_max_memory,
    )
    from accel_bigmodel.meta import (
        init_empty_weights as init_empty_weights,
    )
    from accel_bigmodel.meta import (
        init_on_device as init_on_device,
    )
    from accel_bigmodel.offload.store import (
        OffloadedWeightsLoader as OffloadedWeightsLoader,
    )
    from accel_bigmodel.offload.store import (
        PrefixedDataset as PrefixedDataset,
    )
    from accel_bigmodel.offload.store import (
        extract_submodules_state_dict as extract_submodules_state_dict,
    )
    from accel_bigmodel.offload.store import (
        load_offloaded_weight as load_offloaded_weight,
    )
    from accel_bigmodel.offload.store import (
        offload_state_dict as offload_state_dict,
    )
    from accel_bigmodel.offload.store import (
        offload_weight as offload_weight,
    )
    from accel_bigmodel.offload.store import (
        save_offload_index as save_offload_index,
    )
    from accel_bigmodel.pipeline import (
        prepare_pippy as prepare_pippy,
    )
    from accel_bigmodel.placement import (
        check_device_same as check_device_same,
    )
    from accel_bigmodel.placement import (
        retie_parameters as retie_parameters,
    )
    from accel_bigmodel.placement import (
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from accel_bigmodel.sizes import (
        calculate_maximum_sizes as calculate_maximum_sizes,
    )
    from accel_bigmodel.sizes import (
        compute_module_sizes as compute_module_sizes,
    )
    from accel_bigmodel.sizes import (
        compute_module_total_buffer_size as compute_module_total_buffer_size,
    )
    from accel_bigmodel.sizes import (
        get_max_layer_size as get_max_layer_size,
    )
    from accel_bigmodel.sizes import (
        get_module_leaves as get_module_leaves,
    )
    from accel_core.modules.sizes import (
        convert_file_size_to_int as convert_file_size_to_int,
    )
    from accel_core.modules.sizes import (
        dtype_byte_size as dtype_byte_size,
    )
    from accel_core.modules.sizes import (
        id_tensor_storage as id_tensor_storage,
    )
    from accel_core.modules.ties import (
        find_tied_parameters as find_tied_parameters,
    )
    from accel_core.modules.traversal import (
        get_non_persistent_buffers as get_non_persistent_buffers,
    )
    from accel_core.modules.traversal import (
        named_module_tensors as named_module_tensors,
    )

_NAMES = {
    "accel_bigmodel.checkpoint.load": ["LoadedKeys", "load_checkpoint_in_model", "load_offloaded_weights"],
    "accel_bigmodel.checkpoint.read": ["load_state_dict"],
    "accel_bigmodel.device_map.balance": ["get_balanced_memory"],
    "accel_bigmodel.device_map.check": ["check_device_map", "check_tied_parameters_on_same_device", "clean_device_map"],
    "accel_bigmodel.device_map.headroom": ["Workload"],
    "accel_bigmodel.device_map.infer": ["infer_auto_device_map"],
    "accel_bigmodel.device_map.result": ["Plan", "plan_device_map"],
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
    "accel_bigmodel.hooks.casting": [
        "LayerwiseCastingHook",
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "attach_layerwise_casting_hooks",
    ],
    "accel_bigmodel.hooks.cpu_offload": ["CpuOffload", "UserCpuOffloadHook"],
    "accel_bigmodel.hooks.hook": [
        "ModelHook",
        "SequentialHook",
        "add_hook_to_module",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ],
    "accel_bigmodel.hooks.state": ["get_state_dict_from_offload", "get_state_dict_offloaded_model"],
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
