"""The names of `accelerate.commands.config.config_utils` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)
from accelerate._commands import (
    DYNAMO_BACKENDS,
    SubcommandHelpFormatter,
)
from accelerate._rebinding import write_through

__all__ = [
    "DYNAMO_BACKENDS",
    "ComputeEnvironment",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "PrecisionType",
    "SageMakerDistributedType",
    "SubcommandHelpFormatter",
]

write_through(__name__)
