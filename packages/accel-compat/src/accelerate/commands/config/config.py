"""The names of `accelerate.commands.config.config` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _commands, _rebinding
from accelerate._command_functions import config_command as config_command
from accelerate._command_functions import config_command_parser as config_command_parser
from accelerate._command_functions import get_cluster_input as get_cluster_input
from accelerate._command_functions import get_sagemaker_input as get_sagemaker_input
from accelerate._command_functions import get_user_input as get_user_input
from accelerate._commands import cache_dir as cache_dir
from accelerate._commands import default_config_file as default_config_file
from accelerate._commands import default_yaml_config_file as default_yaml_config_file
from accelerate._commands import main_config as main

description = _commands.config_description

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
