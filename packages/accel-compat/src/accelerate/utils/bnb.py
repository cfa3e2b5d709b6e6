"""The names of `accelerate.utils.bnb` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.device_map.balance import get_balanced_memory as get_balanced_memory
from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.dispatch import dispatch_model as dispatch_model
from accel_bigmodel.meta import init_empty_weights as init_empty_weights
from accel_bigmodel.offload.store import offload_weight as offload_weight
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_core.modules.ties import find_tied_parameters as find_tied_parameters
from accelerate import _rebinding
from accelerate._availability import is_4bit_bnb_available as is_4bit_bnb_available
from accelerate._availability import is_8bit_bnb_available as is_8bit_bnb_available

_LATER = {
    "accel_quant.config": [  # for models that are packed
        "BnbQuantizationConfig",
    ],
    "accel_quant.device_map": [
        "get_quantized_model_device_map",
    ],
    "accel_quant.layers": [
        "get_keys_to_not_convert",
        "get_parameter_device",
        "has_4bit_bnb_layers",
        "replace_with_bnb_layers",
    ],
    "accel_quant.load": [
        "load_and_quantize_model",
    ],
    "accel_quant.offload": [
        "quantize_and_offload_8bit",
    ],
}
_rebinding.write_through(__name__, _LATER)
