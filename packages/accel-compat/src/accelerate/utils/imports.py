"""The names of `accelerate.utils.imports` in Accelerate, imported from where accel defines them."""

from accel_core.host.availability import USE_TORCH_XLA as USE_TORCH_XLA
from accel_core.host.availability import is_cuda_available as is_cuda_available
from accel_core.host.availability import is_deepspeed_available as is_deepspeed_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.availability import is_msamp_available as is_msamp_available
from accel_core.host.availability import is_timm_available as is_timm_available
from accel_core.host.availability import is_torchao_available as is_torchao_available
from accel_core.host.availability import is_transformer_engine_available as is_transformer_engine_available
from accel_core.host.availability import is_transformers_available as is_transformers_available
from accel_core.host.environ import patch_environment as patch_environment
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accelerate import _rebinding
from accelerate._availability import *
from accelerate._environment import parse_flag_from_env as parse_flag_from_env

_rebinding.write_through(__name__)
