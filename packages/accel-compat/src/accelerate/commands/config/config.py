"""The names of `accelerate.commands.config.config` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
)
from accelerate._rebinding import write_through

__all__ = [
    "ComputeEnvironment",
]

write_through(__name__)
