"""The names of `accelerate.parallelism_config` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING as TYPE_CHECKING

from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.plugins.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_core.plugins.parallelism import ParallelismConfig as ParallelismConfig
from accel_core.plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from accel_core.plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from accelerate import _rebinding

_rebinding.write_through(__name__)
