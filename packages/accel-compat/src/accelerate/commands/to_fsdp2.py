"""The names of `accelerate.commands.to_fsdp2` in Accelerate, imported from where accel defines them."""

from accel_parallel.to_fsdp2 import ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING
from accel_parallel.to_fsdp2 import ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING
from accel_parallel.to_fsdp2 import ConversionStatus as ConversionStatus
from accel_parallel.to_fsdp2 import convert_config_to_fsdp2 as convert_config_to_fsdp2
from accel_parallel.to_fsdp2 import load_config as load_config
from accel_parallel.to_fsdp2 import to_fsdp2_command as to_fsdp2_command
from accelerate import _rebinding
from accelerate._command_functions import to_fsdp2_command_parser as to_fsdp2_command_parser

_rebinding.write_through(__name__)
