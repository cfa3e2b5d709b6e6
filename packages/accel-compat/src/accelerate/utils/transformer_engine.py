"""The names of `accelerate.utils.transformer_engine` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.availability import is_transformer_engine_available as is_transformer_engine_available
from accel_core.precision.fp8.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accel_core.precision.fp8.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accel_core.precision.fp8.transformer_engine import convert_model as convert_model
from accel_core.precision.fp8.transformer_engine import has_transformer_engine_layers as has_transformer_engine_layers
from accelerate import _rebinding
from accelerate._operations import GatheredParameters as GatheredParameters

_rebinding.write_through(__name__)
