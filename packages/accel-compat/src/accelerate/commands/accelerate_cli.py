"""The names of `accelerate.commands.accelerate_cli` in Accelerate, imported from where accel defines them."""

from accel_launch.commands.launch import (
    launch_command_parser,
)
from accelerate._rebinding import write_through

__all__ = [
    "launch_command_parser",
]

write_through(__name__)
