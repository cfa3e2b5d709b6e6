"""The names of `accelerate.commands.estimate` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.estimate import (
    add_timm_hub_prefix,
    create_ascii_table,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
)
from accel_bigmodel.meta import (
    init_empty_weights,
)
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
)
from accel_core.host.availability import (
    is_timm_available,
    is_transformers_available,
)
from accel_core.modules.sizes import (
    convert_bytes,
)
from accelerate._commands import (
    main_estimate as main,
)
from accelerate._hub import (
    check_has_model,
    verify_on_hub,
)
from accelerate._rebinding import write_through

__all__ = [
    "add_timm_hub_prefix",
    "calculate_maximum_sizes",
    "check_has_model",
    "convert_bytes",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "init_empty_weights",
    "is_timm_available",
    "is_transformers_available",
    "main",
    "verify_on_hub",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
