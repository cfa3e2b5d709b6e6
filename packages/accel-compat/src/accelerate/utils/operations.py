"""The names of `accelerate.utils.operations` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import concatenate as concatenate
from accel_core.comm.batch import find_batch_size as find_batch_size
from accel_core.comm.batch import find_device as find_device
from accel_core.comm.batch import listify as listify
from accel_core.comm.batch import pad_input_tensors as pad_input_tensors
from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.batch import slice_tensors as slice_tensors
from accel_core.comm.collectives import broadcast as broadcast
from accel_core.comm.collectives import gather as gather
from accel_core.comm.collectives import reduce as reduce
from accel_core.comm.objects import broadcast_object_list as broadcast_object_list
from accel_core.comm.objects import gather_object as gather_object
from accel_core.comm.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_core.comm.padding import gather_tensor_shape as gather_tensor_shape
from accel_core.comm.padding import pad_across_processes as pad_across_processes
from accel_core.comm.tree import honor_type as honor_type
from accel_core.comm.tree import is_namedtuple as is_namedtuple
from accel_core.comm.tree import is_torch_tensor as is_torch_tensor
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.precision.autocast import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_core.precision.autocast import convert_to_fp32 as convert_to_fp32
from accel_core.state.process import PartialState as PartialState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_torch_distributed_available as is_torch_distributed_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate._operations import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from accelerate._operations import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from accelerate._operations import GatheredParameters as GatheredParameters
from accelerate._operations import TensorInformation as TensorInformation
from accelerate._operations import copy_tensor_to_devices as copy_tensor_to_devices
from accelerate._operations import get_data_structure as get_data_structure
from accelerate._operations import get_shape as get_shape
from accelerate._operations import ignorant_find_batch_size as ignorant_find_batch_size
from accelerate._operations import initialize_tensors as initialize_tensors
from accelerate._operations import is_tensor_information as is_tensor_information
from accelerate._operations import is_torch_xpu_tensor as is_torch_xpu_tensor
from accelerate._precision import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accelerate._verification import DistributedOperationException as DistributedOperationException
from accelerate._verification import chained_operation as chained_operation
from accelerate._verification import verify_operation as verify_operation

_rebinding.write_through(__name__)
