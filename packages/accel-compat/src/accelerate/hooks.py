"""The names of `accelerate.hooks` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.hooks.align import (
    AlignDevicesHook,
)
from accel_bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accel_bigmodel.hooks.casting import (
    LayerwiseCastingHook,
)
from accel_bigmodel.hooks.cpu_offload import (
    CpuOffload,
    UserCpuOffloadHook,
)
from accel_bigmodel.hooks.hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.offload.store import (
    PrefixedDataset,
)
from accel_bigmodel.placement import (
    set_module_tensor_to_device,
)
from accel_core.comm.batch import (
    find_device,
    send_to_device,
)
from accel_core.devices.memory import (
    clear_device_cache,
)
from accel_core.modules.traversal import (
    get_non_persistent_buffers,
    named_module_tensors,
)
from accel_core.state.process import (
    PartialState,
)
from accelerate._availability import (
    is_mlu_available,
    is_musa_available,
    is_npu_available,
)
from accelerate._names import (
    recursive_getattr,
)
from accelerate._rebinding import write_through

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "PartialState",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "clear_device_cache",
    "find_device",
    "get_non_persistent_buffers",
    "is_mlu_available",
    "is_musa_available",
    "is_npu_available",
    "named_module_tensors",
    "recursive_getattr",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "send_to_device",
    "set_module_tensor_to_device",
]

write_through(__name__)
