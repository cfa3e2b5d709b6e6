"""The names of `accelerate.optimizer` in Accelerate, imported from where accel defines them."""

from accel_core.comm.tree import (
    honor_type,
)
from accel_core.optim.optimizer import (
    AcceleratedOptimizer,
    move_to_device,
    patch_optimizer_step,
)
from accel_core.options.enums import (
    DistributedType,
)
from accel_core.state.gradient import (
    GradientState,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accelerate._availability import (
    is_lomo_available,
    is_torch_xla_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "honor_type",
    "is_lomo_available",
    "is_torch_xla_available",
    "move_to_device",
    "patch_optimizer_step",
]

write_through(__name__)
