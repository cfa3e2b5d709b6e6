"""The names of `accelerate.commands.config.config_args` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
    DistributedType,
    SageMakerDistributedType,
)
from accelerate._rebinding import write_through

__all__ = [
    "ComputeEnvironment",
    "DistributedType",
    "SageMakerDistributedType",
]

write_through(__name__)
