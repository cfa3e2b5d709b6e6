"""The names of `accelerate.optimizer` in Accelerate, imported from where accel defines them."""

from accel_core.comm.tree import honor_type as honor_type
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.optimizer import move_to_device as move_to_device
from accel_core.optim.optimizer import patch_optimizer_step as patch_optimizer_step
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding
from accelerate._availability import is_lomo_available as is_lomo_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available

_rebinding.write_through(__name__)
