"""The names of `accelerate.commands.env` in Accelerate, imported from where accel defines them."""

from accel_launch.settings.config import (
    load_config_from_file,
)
from accelerate._availability import (
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)
from accelerate._command_functions import (
    env_command,
    env_command_parser,
)
from accelerate._commands import (
    default_config_file,
    version,
)
from accelerate._commands import (
    main_env as main,
)
from accelerate._rebinding import write_through

__all__ = [
    "default_config_file",
    "env_command",
    "env_command_parser",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_xpu_available",
    "load_config_from_file",
    "main",
    "version",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
