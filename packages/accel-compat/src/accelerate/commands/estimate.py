"""The names of `accelerate.commands.estimate` in Accelerate, imported from where accel defines them."""

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
from accelerate._rebinding import write_through

__all__ = [
    "calculate_maximum_sizes",
    "convert_bytes",
    "init_empty_weights",
    "is_timm_available",
    "is_transformers_available",
    "main",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
