"""The names of `accelerate.checkpointing` in Accelerate, imported from where accel defines them."""

from accel_core.checkpoint.names import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)
from accel_core.checkpoint.plain import (
    load,
    save,
)
from accel_core.host.availability import (
    is_cuda_available,
    is_hpu_available,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.state.process import (
    PartialState,
)
from accelerate._availability import (
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_xpu_available,
)
from accelerate._checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate._names import (
    get_pretty_name,
)
from accelerate._rebinding import write_through

__all__ = [
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "WEIGHTS_NAME",
    "PartialState",
    "get_logger",
    "get_pretty_name",
    "is_cuda_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_musa_available",
    "is_neuron_available",
    "is_sdaa_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_xpu_available",
    "load",
    "load_accelerator_state",
    "load_custom_state",
    "save",
    "save_accelerator_state",
    "save_custom_state",
]

write_through(__name__)
