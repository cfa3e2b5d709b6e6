"""The names of `accelerate.commands.config` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _rebinding
from accelerate._command_functions import config_command_parser as config_command_parser
from accelerate._command_functions import default_command_parser as default_command_parser
from accelerate._command_functions import get_config_parser as get_config_parser
from accelerate._command_functions import update_command_parser as update_command_parser
from accelerate._commands import default_config_file as default_config_file
from accelerate._commands import main_config as main

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
