"""The names of `accelerate.checkpointing` in Accelerate, imported from where accel defines them."""

from accel_core.checkpoint.names import MODEL_NAME as MODEL_NAME
from accel_core.checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_core.checkpoint.names import RNG_STATE_NAME as RNG_STATE_NAME
from accel_core.checkpoint.names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_core.checkpoint.names import SAMPLER_NAME as SAMPLER_NAME
from accel_core.checkpoint.names import SCALER_NAME as SCALER_NAME
from accel_core.checkpoint.names import SCHEDULER_NAME as SCHEDULER_NAME
from accel_core.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accel_core.checkpoint.plain import load as load
from accel_core.checkpoint.plain import save as save
from accel_core.host.availability import is_cuda_available as is_cuda_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.logging import get_logger as get_logger
from accel_core.state.process import PartialState as PartialState
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._checkpointing import load_accelerator_state as load_accelerator_state
from accelerate._checkpointing import load_custom_state as load_custom_state
from accelerate._checkpointing import save_accelerator_state as save_accelerator_state
from accelerate._checkpointing import save_custom_state as save_custom_state
from accelerate._names import get_pretty_name as get_pretty_name

_rebinding.write_through(__name__)
