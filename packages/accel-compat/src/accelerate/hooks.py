"""The names of `accelerate.hooks` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.hooks.align import AlignDevicesHook as AlignDevicesHook
from accel_bigmodel.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accel_bigmodel.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from accel_bigmodel.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
from accel_bigmodel.hooks.hook import ModelHook as ModelHook
from accel_bigmodel.hooks.hook import SequentialHook as SequentialHook
from accel_bigmodel.hooks.hook import add_hook_to_module as add_hook_to_module
from accel_bigmodel.hooks.hook import remove_hook_from_module as remove_hook_from_module
from accel_bigmodel.hooks.hook import remove_hook_from_submodules as remove_hook_from_submodules
from accel_bigmodel.hooks.whole import CpuOffload as CpuOffload
from accel_bigmodel.hooks.whole import LayerwiseCastingHook as LayerwiseCastingHook
from accel_bigmodel.hooks.whole import UserCpuOffloadHook as UserCpuOffloadHook
from accel_bigmodel.offload.store import PrefixedDataset as PrefixedDataset
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_core.comm.batch import find_device as find_device
from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.devices.memory import clear_device_cache as clear_device_cache
from accel_core.modules.traversal import get_non_persistent_buffers as get_non_persistent_buffers
from accel_core.modules.traversal import named_module_tensors as named_module_tensors
from accel_core.state.process import PartialState as PartialState
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._names import recursive_getattr as recursive_getattr

_rebinding.write_through(__name__)
