"""The names of `accelerate.utils.constants` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.hooks.whole import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from accel_core.checkpoint.names import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_core.checkpoint.names import MODEL_NAME as MODEL_NAME
from accel_core.checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_core.checkpoint.names import RNG_STATE_NAME as RNG_STATE_NAME
from accel_core.checkpoint.names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accel_core.checkpoint.names import SAMPLER_NAME as SAMPLER_NAME
from accel_core.checkpoint.names import SCALER_NAME as SCALER_NAME
from accel_core.checkpoint.names import SCHEDULER_NAME as SCHEDULER_NAME
from accel_core.checkpoint.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accel_core.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accel_core.checkpoint.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accel_core.host.versions import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accel_core.options.compilation import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from accel_core.options.enums import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accel_core.plugins.handlers import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accel_parallel.options import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accel_parallel.options import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
from accel_parallel.options import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accel_parallel.options import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accel_parallel.options import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accel_parallel.options import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accel_parallel.options import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accelerate import _rebinding
from accelerate._constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
from accelerate._constants import BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION
from accelerate._constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
from accelerate._constants import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from accelerate._constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accelerate._constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
from accelerate._constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate._constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._elastic import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate._elastic import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS

_LATER = {
    "accel_launch.launchers.sagemaker": [  # of use where a job is sent
        "SAGEMAKER_PARALLEL_EC2_INSTANCES",
    ],
    "accel_launch.settings.config": [
        "SAGEMAKER_PYTHON_VERSION",
        "SAGEMAKER_PYTORCH_VERSION",
        "SAGEMAKER_TRANSFORMERS_VERSION",
    ],
}
_rebinding.write_through(__name__, _LATER)
