"""The names of `accelerate.accelerator` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.hooks.attach import (
    has_offloaded_params,
)
from accel_bigmodel.hooks.state import (
    get_state_dict_offloaded_model,
)
from accel_core.accelerator import (
    Accelerator,
)
from accel_core.checkpoint.names import (
    MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SCALER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accel_core.checkpoint.plain import (
    save,
)
from accel_core.comm.collectives import (
    gather,
    reduce,
)
from accel_core.comm.objects import (
    gather_object,
)
from accel_core.comm.padding import (
    pad_across_processes,
)
from accel_core.comm.tree import (
    recursively_apply,
)
from accel_core.data.dispatcher import (
    DataLoaderDispatcher,
)
from accel_core.data.prepare import (
    prepare_data_loader,
)
from accel_core.data.skip import (
    skip_first_batches,
)
from accel_core.devices.memory import (
    release_memory,
)
from accel_core.host.availability import (
    is_deepspeed_available,
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
)
from accel_core.host.versions import (
    compare_versions,
    is_torch_version,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.modules.compilation import (
    compile_regions,
    is_compiled_module,
)
from accel_core.modules.unwrap import (
    extract_model_from_parallel,
)
from accel_core.optim.optimizer import (
    AcceleratedOptimizer,
)
from accel_core.optim.scheduler import (
    AcceleratedScheduler,
)
from accel_core.options.enums import (
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)
from accel_core.options.fsdp import (
    FSDP2_PYTORCH_VERSION,
    FSDP_PYTORCH_VERSION,
)
from accel_core.options.parallelism import (
    DTENSOR_PYTORCH_VERSION,
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
)
from accel_core.plugins.handlers import (
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
from accel_core.plugins.parallelism import (
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accel_core.plugins.project import (
    ProjectConfiguration,
)
from accel_core.precision.fp8.torchao import (
    convert_model_to_fp8_ao,
)
from accel_core.precision.fp8.transformer_engine import (
    apply_fp8_autowrap,
    convert_model,
)
from accel_core.precision.outputs import (
    convert_outputs_to_fp32,
)
from accel_core.precision.scaler import (
    get_grad_scaler,
)
from accel_core.profiling import (
    PROFILE_PATTERN_NAME,
)
from accel_core.state.gradient import (
    GradientState,
)
from accel_core.state.process import (
    PartialState,
    wait_for_everyone,
)
from accel_core.state.run import (
    AcceleratorState,
)
from accel_core.tracking.discovery import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
)
from accel_core.tracking.tracker import (
    GeneralTracker,
)
from accelerate._availability import (
    is_bf16_available,
    is_bitsandbytes_multi_backend_available,
    is_lomo_available,
    is_megatron_lm_available,
    is_mlu_available,
    is_musa_available,
    is_npu_available,
    is_torch_xla_available,
    is_xpu_available,
)
from accelerate._checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate._engines import (
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accelerate._environment import (
    parse_choice_from_env,
)
from accelerate._kernel import (
    check_os_kernel,
)
from accelerate._models import (
    clean_state_dict_for_safetensors,
)
from accelerate._names import (
    get_pretty_name,
)
from accelerate._precision import (
    get_mixed_precision_context_manager,
)
from accelerate._rebinding import write_through
from accelerate._sharded_models import (
    get_model_tp_size,
    model_has_dtensor,
)

__all__ = [
    "DTENSOR_PYTORCH_VERSION",
    "FSDP2_PYTORCH_VERSION",
    "FSDP_PYTORCH_VERSION",
    "LOGGER_TYPE_TO_CLASS",
    "MODEL_NAME",
    "PROFILE_PATTERN_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SCALER_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "AORecipeKwargs",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PartialState",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "apply_fp8_autowrap",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compare_versions",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_model",
    "convert_model_to_fp8_ao",
    "convert_outputs_to_fp32",
    "ensure_weights_retied",
    "extract_model_from_parallel",
    "filter_trackers",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "gather",
    "gather_object",
    "get_fsdp2_grad_scaler",
    "get_grad_scaler",
    "get_logger",
    "get_mixed_precision_context_manager",
    "get_model_tp_size",
    "get_pretty_name",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_compiled_module",
    "is_deepspeed_available",
    "is_lomo_available",
    "is_megatron_lm_available",
    "is_mlu_available",
    "is_msamp_available",
    "is_musa_available",
    "is_npu_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_transformer_engine_available",
    "is_xpu_available",
    "load_accelerator_state",
    "load_custom_state",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "model_has_dtensor",
    "pad_across_processes",
    "parse_choice_from_env",
    "prepare_data_loader",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "save_accelerator_state",
    "save_custom_state",
    "save_fsdp_model",
    "save_fsdp_optimizer",
    "skip_first_batches",
    "wait_for_everyone",
]

write_through(__name__)
