"""The names of `accelerate.commands.config.default` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_launch.settings.config import ClusterConfig as ClusterConfig
from accel_launch.settings.config import write_basic_config as write_basic_config
from accelerate import _commands, _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._command_functions import default_command_parser as default_command_parser
from accelerate._command_functions import default_config_command as default_config_command
from accelerate._commands import default_json_config_file as default_json_config_file

description = _commands.default_description

_rebinding.write_through(__name__)
