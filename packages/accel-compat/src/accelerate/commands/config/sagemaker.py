"""The names of `accelerate.commands.config.sagemaker` in Accelerate, imported from where accel defines them."""

from accel_core.options.compilation import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_launch.launchers.sagemaker import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
from accel_launch.settings.config import SageMakerConfig as SageMakerConfig
from accelerate import _rebinding
from accelerate._availability import is_boto3_available as is_boto3_available
from accelerate._command_functions import get_sagemaker_input as get_sagemaker_input
from accelerate._commands import DYNAMO_BACKENDS as DYNAMO_BACKENDS

_rebinding.write_through(__name__)
