"""The names of `accelerate.commands.config` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._rebinding import write_through

__all__ = [
    "load_config_from_file",
]

write_through(__name__)
