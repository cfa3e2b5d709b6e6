"""The names of `accelerate.utils.versions` in Accelerate, imported from where accel defines them."""

from accel_core.host.versions import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accelerate import _rebinding

_rebinding.write_through(__name__)
