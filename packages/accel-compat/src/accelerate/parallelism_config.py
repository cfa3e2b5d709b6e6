"""The names of `accelerate.parallelism_config` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING

from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.options.enums import (
    DistributedType,
)
from accel_core.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate._rebinding import write_through

__all__ = [
    "TYPE_CHECKING",
    "DeepSpeedSequenceParallelConfig",
    "DistributedType",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "is_torch_version",
]

write_through(__name__)
