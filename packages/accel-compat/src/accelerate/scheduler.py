"""The names of `accelerate.scheduler` in Accelerate, imported from where accel defines them."""

from accel_core.optim.scheduler import (
    AcceleratedScheduler,
)
from accel_core.state.gradient import (
    GradientState,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accelerate._rebinding import write_through

__all__ = [
    "AcceleratedScheduler",
    "AcceleratorState",
    "GradientState",
]

write_through(__name__)
