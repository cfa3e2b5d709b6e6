"""The names of `accelerate.commands.config` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._command_functions import (
    config_command_parser,
    default_command_parser,
    get_config_parser,
    update_command_parser,
)
from accelerate._commands import (
    default_config_file,
)
from accelerate._commands import (
    main_config as main,
)
from accelerate._rebinding import write_through

__all__ = [
    "config_command_parser",
    "default_command_parser",
    "default_config_file",
    "get_config_parser",
    "load_config_from_file",
    "main",
    "update_command_parser",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
