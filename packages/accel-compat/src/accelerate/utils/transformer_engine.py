"""The names of `accelerate.utils.transformer_engine` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_hpu_available,
    is_transformer_engine_available,
)
from accel_core.precision.fp8.transformer_engine import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from accelerate._operations import (
    GatheredParameters,
)
from accelerate._rebinding import write_through

__all__ = [
    "GatheredParameters",
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
    "is_hpu_available",
    "is_transformer_engine_available",
]

write_through(__name__)
