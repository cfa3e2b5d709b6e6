"""The names of `accelerate.commands.config.update` in Accelerate, imported from where accel defines them."""

from accel_launch.commands.configure import (
    update_config,
)
from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._command_functions import (
    update_command_parser,
    update_config_command,
)
from accelerate._commands import (
    default_config_file,
)
from accelerate._commands import (
    update_description as description,
)
from accelerate._rebinding import write_through

__all__ = [
    "default_config_file",
    "description",
    "load_config_from_file",
    "update_command_parser",
    "update_config",
    "update_config_command",
]

write_through(__name__)
