"""The names of `accelerate.utils.dataclasses` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING as TYPE_CHECKING

from accel_core.host.availability import is_cuda_available as is_cuda_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.availability import is_msamp_available as is_msamp_available
from accel_core.host.availability import is_torchao_available as is_torchao_available
from accel_core.host.availability import is_transformer_engine_available as is_transformer_engine_available
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.options.enums import BaseEnum as BaseEnum
from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_core.options.enums import CustomDtype as CustomDtype
from accel_core.options.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import EnumWithContains as EnumWithContains
from accel_core.options.enums import FP8BackendType as FP8BackendType
from accel_core.options.enums import LoggerType as LoggerType
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.options.enums import RNGType as RNGType
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_core.plugins.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_core.plugins.blocks import get_module_class_from_name as get_module_class_from_name
from accel_core.plugins.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from accel_core.plugins.fp8 import AORecipeKwargs as AORecipeKwargs
from accel_core.plugins.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accel_core.plugins.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel_core.plugins.fp8 import TERecipeKwargs as TERecipeKwargs
from accel_core.plugins.handlers import AutocastKwargs as AutocastKwargs
from accel_core.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_core.plugins.handlers import GradScalerKwargs as GradScalerKwargs
from accel_core.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_core.plugins.handlers import KwargsHandler as KwargsHandler
from accel_core.plugins.handlers import ProfileKwargs as ProfileKwargs
from accel_core.plugins.loading import DataLoaderConfiguration as DataLoaderConfiguration
from accel_core.plugins.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_core.plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from accel_core.plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_core.plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel_core.plugins.project import ProjectConfiguration as ProjectConfiguration
from accel_parallel.options import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accel_parallel.options import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accel_parallel.options import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accel_parallel.options import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate import _rebinding
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_rocm_available as is_rocm_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
from accelerate._constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
from accelerate._constants import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from accelerate._constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._environment import parse_flag_from_env as parse_flag_from_env
from accelerate._operations import TensorInformation as TensorInformation

_LATER = {
    "accel_deepspeed": ["DeepSpeedPlugin"],  # engines that may not be installed
    "accel_megatron.model_configs": [
        "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
        "add_model_config_to_megatron_parser",
        "parse_bert_config",
        "parse_glm4_moe_config",
        "parse_gpt2_config",
        "parse_llama_config",
        "parse_t5_config",
    ],
    "accel_megatron.plugin": [
        "MegatronLMPlugin",
    ],
    "accel_quant.config": ["BnbQuantizationConfig"],  # for models that are packed
}
_rebinding.write_through(__name__, _LATER)
