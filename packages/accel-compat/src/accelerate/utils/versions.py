"""The names of `accelerate.utils.versions` in Accelerate, imported from where accel defines them."""

from accel_core.host.versions import (
    STR_OPERATION_TO_FUNC,
    compare_versions,
    is_torch_version,
)
from accelerate._rebinding import write_through

__all__ = [
    "STR_OPERATION_TO_FUNC",
    "compare_versions",
    "is_torch_version",
]

write_through(__name__)
