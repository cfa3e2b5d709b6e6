"""The names of `accelerate.commands.accelerate_cli` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.estimate import estimate_command_parser as estimate_command_parser
from accel_launch.commands.launch import launch_command_parser as launch_command_parser
from accelerate import _rebinding
from accelerate._command_functions import env_command_parser as env_command_parser
from accelerate._command_functions import get_config_parser as get_config_parser
from accelerate._command_functions import merge_command_parser as merge_command_parser
from accelerate._command_functions import test_command_parser as test_command_parser
from accelerate._command_functions import to_fsdp2_command_parser as to_fsdp2_command_parser
from accelerate._command_functions import tpu_command_parser as tpu_command_parser
from accelerate._commands import main as main

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
