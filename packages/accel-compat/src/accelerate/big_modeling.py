"""The names of `accelerate.big_modeling` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import (
    load_checkpoint_in_model,
)
from accel_bigmodel.device_map.balance import (
    get_balanced_memory,
)
from accel_bigmodel.device_map.check import (
    check_device_map,
)
from accel_bigmodel.device_map.infer import (
    infer_auto_device_map,
)
from accel_bigmodel.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accel_bigmodel.hooks.align import (
    AlignDevicesHook,
)
from accel_bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from accel_bigmodel.hooks.casting import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    LayerwiseCastingHook,
    attach_layerwise_casting_hooks,
)
from accel_bigmodel.hooks.cpu_offload import (
    CpuOffload,
    UserCpuOffloadHook,
)
from accel_bigmodel.hooks.hook import (
    add_hook_to_module,
)
from accel_bigmodel.meta import (
    init_empty_weights,
    init_on_device,
)
from accel_bigmodel.offload.store import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from accel_bigmodel.placement import (
    retie_parameters,
)
from accel_core.modules.ties import (
    find_tied_parameters,
)
from accelerate._availability import (
    is_bnb_available,
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)
from accelerate._environment import (
    parse_flag_from_env,
)
from accelerate._machine import (
    check_cuda_p2p_ib_support,
)
from accelerate._names import (
    recursive_getattr,
)
from accelerate._rebinding import write_through

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "OffloadedWeightsLoader",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_layerwise_casting_hooks",
    "check_cuda_p2p_ib_support",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_bnb_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_xpu_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "offload_state_dict",
    "parse_flag_from_env",
    "recursive_getattr",
    "retie_parameters",
]

write_through(__name__)
