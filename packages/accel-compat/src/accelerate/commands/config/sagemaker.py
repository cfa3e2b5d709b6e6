"""The names of `accelerate.commands.config.sagemaker` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import (
    is_boto3_available,
)
from accel_core.options.compilation import (
    TORCH_DYNAMO_MODES,
)
from accel_core.options.enums import (
    ComputeEnvironment,
    SageMakerDistributedType,
)
from accel_launch.settings.config import (
    SageMakerConfig,
)
from accelerate._rebinding import write_through

__all__ = [
    "TORCH_DYNAMO_MODES",
    "ComputeEnvironment",
    "SageMakerConfig",
    "SageMakerDistributedType",
    "is_boto3_available",
]

write_through(__name__)
