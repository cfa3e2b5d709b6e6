"""The names of `accelerate.commands.to_fsdp2` in Accelerate, imported from where accel defines them."""

from accelerate._engines import (
    convert_config_to_fsdp2,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from accelerate._rebinding import write_through

__all__ = [
    "convert_config_to_fsdp2",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
]

write_through(__name__)
