"""The names of `accelerate.inference` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.device_map.infer import (
    infer_auto_device_map,
)
from accel_bigmodel.pipeline import (
    build_pipeline,
    find_pippy_batch_size,
    generate_device_map,
    pippy_forward,
    prepare_pippy,
)
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
)
from accel_core.comm.batch import (
    pad_input_tensors,
    send_to_device,
)
from accel_core.modules.sizes import (
    convert_bytes,
)
from accel_core.state.process import (
    PartialState,
)
from accelerate._availability import (
    is_pippy_available,
)
from accelerate._operations import (
    copy_tensor_to_devices,
    ignorant_find_batch_size,
)
from accelerate._rebinding import write_through

__all__ = [
    "PartialState",
    "build_pipeline",
    "calculate_maximum_sizes",
    "convert_bytes",
    "copy_tensor_to_devices",
    "find_pippy_batch_size",
    "generate_device_map",
    "ignorant_find_batch_size",
    "infer_auto_device_map",
    "is_pippy_available",
    "pad_input_tensors",
    "pippy_forward",
    "prepare_pippy",
    "send_to_device",
]

write_through(__name__)
