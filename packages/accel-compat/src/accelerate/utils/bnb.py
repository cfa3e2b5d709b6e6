"""The names of `accelerate.utils.bnb` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import (
    load_checkpoint_in_model,
)
from accel_bigmodel.device_map.balance import (
    get_balanced_memory,
)
from accel_bigmodel.device_map.infer import (
    infer_auto_device_map,
)
from accel_bigmodel.dispatch import (
    dispatch_model,
)
from accel_bigmodel.meta import (
    init_empty_weights,
)
from accel_bigmodel.offload.store import (
    offload_weight,
)
from accel_bigmodel.placement import (
    set_module_tensor_to_device,
)
from accel_core.modules.ties import (
    find_tied_parameters,
)
from accel_quant.config import (
    BnbQuantizationConfig,
)
from accel_quant.device_map import (
    get_quantized_model_device_map,
)
from accel_quant.layers import (
    get_keys_to_not_convert,
    get_parameter_device,
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)
from accel_quant.load import (
    load_and_quantize_model,
)
from accel_quant.offload import (
    quantize_and_offload_8bit,
)
from accelerate._availability import (
    is_4bit_bnb_available,
    is_8bit_bnb_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "BnbQuantizationConfig",
    "dispatch_model",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "has_4bit_bnb_layers",
    "infer_auto_device_map",
    "init_empty_weights",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "load_and_quantize_model",
    "load_checkpoint_in_model",
    "offload_weight",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
    "set_module_tensor_to_device",
]

write_through(__name__)
