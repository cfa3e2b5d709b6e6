"""The names of `accelerate.local_sgd` in Accelerate, imported from where accel defines them."""

from accel_core.accelerator import (
    Accelerator,
)
from accel_core.optim.local_sgd import (
    LocalSGD,
)
from accel_core.options.enums import (
    DistributedType,
)
from accelerate._rebinding import write_through

__all__ = [
    "Accelerator",
    "DistributedType",
    "LocalSGD",
]

write_through(__name__)
