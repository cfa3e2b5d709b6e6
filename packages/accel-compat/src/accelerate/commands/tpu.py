"""The names of `accelerate.commands.tpu` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _rebinding
from accelerate._command_functions import tpu_command_launcher as tpu_command_launcher
from accelerate._command_functions import tpu_command_parser as tpu_command_parser
from accelerate._commands import default_config_file as default_config_file
from accelerate._commands import main_tpu as main

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
