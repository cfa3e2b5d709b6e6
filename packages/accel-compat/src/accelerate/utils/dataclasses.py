"""The names of `accelerate.utils.dataclasses` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING

from accel_core.host.availability import (
    is_cuda_available,
    is_hpu_available,
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
)
from accel_core.host.environ import (
    str_to_bool,
)
from accel_core.host.versions import (
    compare_versions,
    is_torch_version,
)
from accel_core.options.enums import (
    BaseEnum,
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    EnumWithContains,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from accel_core.options.fsdp import (
    FSDP2_PYTORCH_VERSION,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
)
from accel_core.options.parallelism import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from accel_core.plugins.accumulation import (
    GradientAccumulationPlugin,
)
from accel_core.plugins.compilation import (
    TorchDynamoPlugin,
)
from accel_core.plugins.deepspeed import (
    DeepSpeedPlugin,
)
from accel_core.plugins.fp8 import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accel_core.plugins.fsdp import (
    FullyShardedDataParallelPlugin,
    get_module_class_from_name,
)
from accel_core.plugins.handlers import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accel_core.plugins.loading import (
    DataLoaderConfiguration,
)
from accel_core.plugins.megatron import (
    MegatronLMPlugin,
)
from accel_core.plugins.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    parse_bert_config,
    parse_glm4_moe_config,
    parse_gpt2_config,
    parse_llama_config,
    parse_t5_config,
)
from accel_core.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_core.plugins.project import (
    ProjectConfiguration,
)
from accel_quant.config import (
    BnbQuantizationConfig,
)
from accelerate._availability import (
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_rocm_available,
    is_xpu_available,
)
from accelerate._environment import (
    parse_flag_from_env,
)
from accelerate._operations import (
    TensorInformation,
)
from accelerate._rebinding import write_through

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "FSDP2_PYTORCH_VERSION",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_SHARDING_STRATEGY",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "TYPE_CHECKING",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "add_model_config_to_megatron_parser",
    "compare_versions",
    "get_module_class_from_name",
    "is_cuda_available",
    "is_hpu_available",
    "is_mlu_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_rocm_available",
    "is_torch_version",
    "is_torchao_available",
    "is_transformer_engine_available",
    "is_xpu_available",
    "parse_bert_config",
    "parse_flag_from_env",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
    "str_to_bool",
]

write_through(__name__)
