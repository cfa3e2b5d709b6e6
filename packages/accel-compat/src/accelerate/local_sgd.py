"""The names of `accelerate.local_sgd` in Accelerate, imported from where accel defines them."""

from accel_core.accelerator import Accelerator as Accelerator
from accel_core.optim.local_sgd import LocalSGD as LocalSGD
from accel_core.options.enums import DistributedType as DistributedType
from accelerate import _rebinding

_rebinding.write_through(__name__)
