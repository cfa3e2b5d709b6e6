"""The names of `accelerate.commands.config.sagemaker` in Accelerate, imported from where accel defines them."""

from accel_core.options.compilation import (
    TORCH_DYNAMO_MODES,
)
from accel_core.options.enums import (
    ComputeEnvironment,
    SageMakerDistributedType,
)
from accel_launch.launchers.sagemaker import (
    SAGEMAKER_PARALLEL_EC2_INSTANCES,
)
from accel_launch.settings.config import (
    SageMakerConfig,
)
from accelerate._availability import (
    is_boto3_available,
)
from accelerate._command_functions import (
    get_sagemaker_input,
)
from accelerate._commands import (
    DYNAMO_BACKENDS,
)
from accelerate._rebinding import write_through

__all__ = [
    "DYNAMO_BACKENDS",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES",
    "TORCH_DYNAMO_MODES",
    "ComputeEnvironment",
    "SageMakerConfig",
    "SageMakerDistributedType",
    "get_sagemaker_input",
    "is_boto3_available",
]

write_through(__name__)
