"""The names of `accelerate.commands.env` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_mps_available as is_mps_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._command_functions import env_command as env_command
from accelerate._command_functions import env_command_parser as env_command_parser
from accelerate._commands import default_config_file as default_config_file
from accelerate._commands import main_env as main
from accelerate._commands import version as version

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
