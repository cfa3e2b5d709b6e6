"""The names of `accelerate.utils.ao` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING

from accel_core.host.availability import (
    is_torchao_available,
)
from accel_core.precision.fp8.torchao import (
    convert_model_to_fp8_ao,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accelerate._availability import (
    torchao_required,
)
from accelerate._precision import (
    filter_first_and_last_linear_layers,
)
from accelerate._rebinding import write_through

__all__ = [
    "TYPE_CHECKING",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
    "is_torchao_available",
    "torchao_required",
]

write_through(__name__)
