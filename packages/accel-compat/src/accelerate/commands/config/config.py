"""The names of `accelerate.commands.config.config` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
)
from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._command_functions import (
    config_command,
    config_command_parser,
    get_cluster_input,
    get_sagemaker_input,
    get_user_input,
)
from accelerate._commands import (
    cache_dir,
    default_config_file,
    default_yaml_config_file,
)
from accelerate._commands import (
    config_description as description,
)
from accelerate._commands import (
    main_config as main,
)
from accelerate._rebinding import write_through

__all__ = [
    "ComputeEnvironment",
    "cache_dir",
    "config_command",
    "config_command_parser",
    "default_config_file",
    "default_yaml_config_file",
    "description",
    "get_cluster_input",
    "get_sagemaker_input",
    "get_user_input",
    "load_config_from_file",
    "main",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
