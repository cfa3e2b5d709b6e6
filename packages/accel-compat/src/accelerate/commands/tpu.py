"""The names of `accelerate.commands.tpu` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._command_functions import (
    tpu_command_launcher,
    tpu_command_parser,
)
from accelerate._commands import (
    default_config_file,
)
from accelerate._commands import (
    main_tpu as main,
)
from accelerate._rebinding import write_through

__all__ = [
    "default_config_file",
    "load_config_from_file",
    "main",
    "tpu_command_launcher",
    "tpu_command_parser",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
