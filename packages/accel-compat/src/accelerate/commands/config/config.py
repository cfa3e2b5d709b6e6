"""The names of `accelerate.commands.config.config` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
)
from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._rebinding import write_through

__all__ = [
    "ComputeEnvironment",
    "load_config_from_file",
]

write_through(__name__)
