"""The names of `accelerate.commands.config.update` in Accelerate, imported from where accel defines them."""

from accel_launch.commands.configure import (
    update_config,
)
from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._rebinding import write_through

__all__ = [
    "load_config_from_file",
    "update_config",
]

write_through(__name__)
