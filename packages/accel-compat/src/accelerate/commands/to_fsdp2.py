"""The names of `accelerate.commands.to_fsdp2` in Accelerate, imported from where accel defines them."""

from accel_parallel.to_fsdp2 import (
    ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING,
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
)
from accelerate._command_functions import (
    to_fsdp2_command_parser,
)
from accelerate._rebinding import write_through

__all__ = [
    "ARGUMENT_KEY_MAPPING",
    "ARGUMENT_VALUE_MAPPING",
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
]

write_through(__name__)
