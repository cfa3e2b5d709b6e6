"""The names of `accelerate.commands.accelerate_cli` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.estimate import (
    estimate_command_parser,
)
from accel_launch.commands.launch import (
    launch_command_parser,
)
from accelerate._command_functions import (
    env_command_parser,
    get_config_parser,
    merge_command_parser,
    test_command_parser,
    to_fsdp2_command_parser,
    tpu_command_parser,
)
from accelerate._commands import (
    main,
)
from accelerate._rebinding import write_through

__all__ = [
    "env_command_parser",
    "estimate_command_parser",
    "get_config_parser",
    "launch_command_parser",
    "main",
    "merge_command_parser",
    "test_command_parser",
    "to_fsdp2_command_parser",
    "tpu_command_parser",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
