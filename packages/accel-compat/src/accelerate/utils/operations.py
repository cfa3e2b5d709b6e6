"""The names of `accelerate.utils.operations` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import (
    concatenate,
    find_batch_size,
    find_device,
    listify,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from accel_core.comm.collectives import (
    broadcast,
    gather,
    reduce,
)
from accel_core.comm.objects import (
    broadcast_object_list,
    gather_object,
)
from accel_core.comm.padding import (
    CannotPadNestedTensorWarning,
    gather_tensor_shape,
    pad_across_processes,
)
from accel_core.comm.tree import (
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    recursively_apply,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.options.enums import (
    TORCH_DISTRIBUTED_OPERATION_TYPES,
    DistributedType,
)
from accel_core.precision.outputs import (
    convert_outputs_to_fp32,
    convert_to_fp32,
)
from accel_core.state.process import (
    PartialState,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accelerate._availability import (
    is_npu_available,
    is_torch_distributed_available,
    is_torch_xla_available,
)
from accelerate._operations import (
    TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT,
    GatheredParameters,
    TensorInformation,
    copy_tensor_to_devices,
    get_data_structure,
    get_shape,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
    is_torch_xpu_tensor,
)
from accelerate._precision import (
    ConvertOutputsToFp32,
)
from accelerate._rebinding import write_through
from accelerate._verification import (
    DistributedOperationException,
    chained_operation,
    verify_operation,
)

__all__ = [
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "AcceleratorState",
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "DistributedType",
    "GatheredParameters",
    "PartialState",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_npu_available",
    "is_tensor_information",
    "is_torch_distributed_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torch_xpu_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]

write_through(__name__)
