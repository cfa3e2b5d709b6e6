"""8-bit and 4-bit models for accel, through bitsandbytes."""

from typing import Any

from accel_core._lazy import attach
from accel_quant._version import __version__

_HOMES = {
    "BnbQuantizationConfig": "accel_quant.config",
    "get_keys_to_not_convert": "accel_quant.layers",
    "get_parameter_device": "accel_quant.layers",
    "get_quantized_model_device_map": "accel_quant.device_map",
    "has_4bit_bnb_layers": "accel_quant.layers",
    "load_and_quantize_model": "accel_quant.load",
    "quantize_and_offload_8bit": "accel_quant.offload",
    "replace_with_bnb_layers": "accel_quant.layers",
}

_getattr, __dir__, _names = attach(__name__, _HOMES)

__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    return _getattr(name)
