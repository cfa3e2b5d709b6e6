"""The names of accelerate.utils.bnb, which are imported when they are first used. Written by `nox -s stubs`."""

from accel_bigmodel.checkpoint.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.device_map.balance import get_balanced_memory as get_balanced_memory
from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.dispatch import dispatch_model as dispatch_model
from accel_bigmodel.meta import init_empty_weights as init_empty_weights
from accel_bigmodel.offload.store import offload_weight as offload_weight
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_core.modules.ties import find_tied_parameters as find_tied_parameters
from accel_quant.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel_quant.device_map import get_quantized_model_device_map as get_quantized_model_device_map
from accel_quant.layers import get_keys_to_not_convert as get_keys_to_not_convert
from accel_quant.layers import get_parameter_device as get_parameter_device
from accel_quant.layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_quant.layers import replace_with_bnb_layers as replace_with_bnb_layers
from accel_quant.load import load_and_quantize_model as load_and_quantize_model
from accel_quant.offload import quantize_and_offload_8bit as quantize_and_offload_8bit
from accelerate._availability import is_4bit_bnb_available as is_4bit_bnb_available
from accelerate._availability import is_8bit_bnb_available as is_8bit_bnb_available
