"""The names of `accelerate.commands.config.default` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_hpu_available,
)
from accel_launch.settings.config import (
    ClusterConfig,
    write_basic_config,
)
from accelerate._availability import (
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)
from accelerate._command_functions import (
    default_command_parser,
    default_config_command,
)
from accelerate._commands import (
    default_description as description,
)
from accelerate._commands import (
    default_json_config_file,
)
from accelerate._rebinding import write_through

__all__ = [
    "ClusterConfig",
    "default_command_parser",
    "default_config_command",
    "default_json_config_file",
    "description",
    "is_hpu_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_xpu_available",
    "write_basic_config",
]

write_through(__name__)
