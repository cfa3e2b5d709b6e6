"""The names of `accelerate.commands.config.update` in Accelerate, imported from where accel defines them."""

from accel_launch.commands.configure import update_config as update_config
from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _commands, _rebinding
from accelerate._command_functions import update_command_parser as update_command_parser
from accelerate._command_functions import update_config_command as update_config_command
from accelerate._commands import default_config_file as default_config_file

description = _commands.update_description

_rebinding.write_through(__name__)
