"""The names of `accelerate.commands.config.config_utils` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import FP8BackendType as FP8BackendType
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate import _rebinding
from accelerate._commands import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from accelerate._commands import SubcommandHelpFormatter as SubcommandHelpFormatter

_rebinding.write_through(__name__)
