"""The names of `accelerate.utils.ao` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING as TYPE_CHECKING

from accel_core.host.availability import is_torchao_available as is_torchao_available
from accel_core.precision.fp8.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel_core.precision.fp8.torchao import filter_linear_layers as filter_linear_layers
from accel_core.precision.fp8.torchao import find_first_last_linear_layers as find_first_last_linear_layers
from accel_core.precision.fp8.torchao import has_ao_layers as has_ao_layers
from accelerate import _rebinding
from accelerate._availability import torchao_required as torchao_required
from accelerate._precision import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers

_rebinding.write_through(__name__)
