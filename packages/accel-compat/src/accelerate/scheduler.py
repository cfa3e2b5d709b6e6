"""The names of `accelerate.scheduler` in Accelerate, imported from where accel defines them."""

from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding

_rebinding.write_through(__name__)
