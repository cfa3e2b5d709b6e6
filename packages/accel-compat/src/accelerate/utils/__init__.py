"""The names of `accelerate.utils` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import (
    load_checkpoint_in_model,
    load_offloaded_weights,
)
from accel_bigmodel.checkpoint.read import (
    load_state_dict,
)
from accel_bigmodel.device_map.balance import (
    get_balanced_memory,
)
from accel_bigmodel.device_map.check import (
    check_device_map,
    check_tied_parameters_on_same_device,
)
from accel_bigmodel.device_map.infer import (
    infer_auto_device_map,
)
from accel_bigmodel.device_map.ties import (
    check_tied_parameters_in_config,
)
from accel_bigmodel.hooks.attach import (
    align_module_device,
    has_offloaded_params,
)
from accel_bigmodel.hooks.state import (
    get_state_dict_offloaded_model,
)
from accel_bigmodel.memory import (
    get_max_memory,
)
from accel_bigmodel.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_bigmodel.placement import (
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    get_max_layer_size,
)
from accel_core.checkpoint.names import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accel_core.checkpoint.plain import (
    load,
    save,
)
from accel_core.comm.batch import (
    concatenate,
    find_batch_size,
    find_device,
    listify,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from accel_core.comm.collectives import (
    broadcast,
    gather,
    reduce,
)
from accel_core.comm.objects import (
    broadcast_object_list,
    gather_object,
)
from accel_core.comm.padding import (
    CannotPadNestedTensorWarning,
    pad_across_processes,
)
from accel_core.comm.tree import (
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    recursively_apply,
)
from accel_core.devices.memory import (
    find_executable_batch_size,
    release_memory,
)
from accel_core.host.affinity import (
    set_numa_affinity,
)
from accel_core.host.availability import (
    is_cuda_available,
    is_deepspeed_available,
    is_hpu_available,
    is_msamp_available,
    is_timm_available,
    is_torchao_available,
    is_transformer_engine_available,
    is_transformers_available,
)
from accel_core.host.colab import (
    install_xla,
)
from accel_core.host.environ import (
    clear_environment,
    patch_environment,
    str_to_bool,
)
from accel_core.host.versions import (
    compare_versions,
    is_torch_version,
)
from accel_core.modules.compilation import (
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
)
from accel_core.modules.sizes import (
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    id_tensor_storage,
)
from accel_core.modules.ties import (
    find_tied_parameters,
)
from accel_core.modules.traversal import (
    named_module_tensors,
)
from accel_core.modules.unwrap import (
    extract_model_from_parallel,
)
from accel_core.options.enums import (
    TORCH_DISTRIBUTED_OPERATION_TYPES,
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
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
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
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
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
)
from accel_core.plugins.megatron_models import (
    add_model_config_to_megatron_parser,
)
from accel_core.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_core.plugins.project import (
    ProjectConfiguration,
)
from accel_core.precision.fp8.torchao import (
    convert_model_to_fp8_ao,
    has_ao_layers,
)
from accel_core.precision.fp8.transformer_engine import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from accel_core.precision.outputs import (
    convert_outputs_to_fp32,
    convert_to_fp32,
)
from accel_core.precision.scaler import (
    get_grad_scaler,
)
from accel_core.profiling import (
    PROFILE_PATTERN_NAME,
)
from accel_core.random import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accel_core.state.process import (
    wait_for_everyone,
)
from accel_launch.notebook import (
    PrepareForLaunch,
)
from accel_launch.settings.config import (
    write_basic_config,
)
from accel_quant.config import (
    BnbQuantizationConfig,
)
from accel_quant.layers import (
    has_4bit_bnb_layers,
)
from accel_quant.load import (
    load_and_quantize_model,
)
from accelerate._availability import (
    deepspeed_required,
    is_4bit_bnb_available,
    is_8bit_bnb_available,
    is_aim_available,
    is_amdsmi_available,
    is_bf16_available,
    is_bitsandbytes_multi_backend_available,
    is_bnb_available,
    is_boto3_available,
    is_clearml_available,
    is_comet_ml_available,
    is_datasets_available,
    is_dvclive_available,
    is_fp8_available,
    is_fp16_available,
    is_habana_gaudi1,
    is_import_timer_available,
    is_lomo_available,
    is_matplotlib_available,
    is_megatron_lm_available,
    is_mlflow_available,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_pandas_available,
    is_peft_available,
    is_pippy_available,
    is_pynvml_available,
    is_pytest_available,
    is_rich_available,
    is_rocm_available,
    is_sagemaker_available,
    is_schedulefree_available,
    is_sdaa_available,
    is_swanlab_available,
    is_tensorboard_available,
    is_torch_xla_available,
    is_torchdata_available,
    is_torchdata_stateful_dataloader_available,
    is_torchvision_available,
    is_trackio_available,
    is_transformer_engine_mxfp8_available,
    is_triton_available,
    is_wandb_available,
    is_weights_only_available,
    is_xccl_available,
    is_xpu_available,
    torchao_required,
)
from accelerate._elastic import (
    TORCH_LAUNCH_PARAMS,
)
from accelerate._engines import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accelerate._environment import (
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    purge_accelerate_environment,
)
from accelerate._kernel import (
    check_os_kernel,
)
from accelerate._launch_preparation import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accelerate._machine import (
    are_libraries_initialized,
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    get_cpu_distributed_information,
    get_current_device_type,
    get_gpu_info,
    is_port_in_use,
)
from accelerate._merging import (
    merge_dicts,
)
from accelerate._models import (
    clean_state_dict_for_safetensors,
    get_module_children_bottom_up,
    is_peft_model,
)
from accelerate._names import (
    get_pretty_name,
    recursive_getattr,
)
from accelerate._operations import (
    GatheredParameters,
    TensorInformation,
    copy_tensor_to_devices,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
)
from accelerate._precision import (
    filter_first_and_last_linear_layers,
    get_mixed_precision_context_manager,
)
from accelerate._rebinding import write_through
from accelerate._sharded_models import (
    get_model_tp_size,
    model_has_dtensor,
)
from accelerate._weights_merging import (
    merge_fsdp_weights,
)
from accelerate.utils import (
    ao as ao,
)
from accelerate.utils import (
    bnb as bnb,
)
from accelerate.utils import (
    constants as constants,
)
from accelerate.utils import (
    dataclasses as dataclasses,
)
from accelerate.utils import (
    deepspeed as deepspeed,
)
from accelerate.utils import (
    environment as environment,
)
from accelerate.utils import (
    fsdp_utils as fsdp_utils,
)
from accelerate.utils import (
    imports as imports,
)
from accelerate.utils import (
    launch as launch,
)
from accelerate.utils import (
    megatron_lm as megatron_lm,
)
from accelerate.utils import (
    memory as memory,
)
from accelerate.utils import (
    modeling as modeling,
)
from accelerate.utils import (
    offload as offload,
)
from accelerate.utils import (
    operations as operations,
)
from accelerate.utils import (
    other as other,
)
from accelerate.utils import (
    random as random,
)
from accelerate.utils import (
    torch_xla as torch_xla,
)
from accelerate.utils import (
    transformer_engine as transformer_engine,
)
from accelerate.utils import (
    versions as versions,
)
from accelerate.utils.tqdm import (
    tqdm,
)

__all__ = [
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_LAUNCH_PARAMS",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "AORecipeKwargs",
    "AbstractTrainStep",
    "AutocastKwargs",
    "BertTrainStep",
    "BnbQuantizationConfig",
    "CannotPadNestedTensorWarning",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GPTTrainStep",
    "GatheredParameters",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "OffloadedWeightsLoader",
    "ParallelismConfig",
    "PrecisionType",
    "PrefixedDataset",
    "PrepareForLaunch",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "T5TrainStep",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "add_model_config_to_megatron_parser",
    "align_module_device",
    "apply_fp8_autowrap",
    "are_libraries_initialized",
    "avg_losses_across_data_parallel_group",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "check_device_map",
    "check_os_kernel",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_state_dict_for_safetensors",
    "clear_environment",
    "compare_versions",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "compute_module_sizes",
    "concatenate",
    "contextual_fp8_autocast",
    "convert_bytes",
    "convert_dict_to_env_variables",
    "convert_file_size_to_int",
    "convert_model",
    "convert_model_to_fp8_ao",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "deepspeed_required",
    "disable_fsdp_ram_efficient_loading",
    "dtype_byte_size",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "extract_model_from_parallel",
    "extract_submodules_state_dict",
    "filter_first_and_last_linear_layers",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "find_tied_parameters",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_data_structure",
    "get_fsdp2_grad_scaler",
    "get_gpu_info",
    "get_grad_scaler",
    "get_int_from_env",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "get_state_dict_offloaded_model",
    "has_4bit_bnb_layers",
    "has_ao_layers",
    "has_compiled_regions",
    "has_offloaded_params",
    "has_transformer_engine_layers",
    "honor_type",
    "id_tensor_storage",
    "ignorant_find_batch_size",
    "infer_auto_device_map",
    "initialize_tensors",
    "install_xla",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_namedtuple",
    "is_neuron_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_peft_model",
    "is_pippy_available",
    "is_port_in_use",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensor_information",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "listify",
    "load",
    "load_and_quantize_model",
    "load_checkpoint_in_model",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "merge_dicts",
    "merge_fsdp_weights",
    "model_has_dtensor",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "pad_across_processes",
    "pad_input_tensors",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "purge_accelerate_environment",
    "recursive_getattr",
    "recursively_apply",
    "reduce",
    "release_memory",
    "retie_parameters",
    "save",
    "save_fsdp_model",
    "save_fsdp_optimizer",
    "save_offload_index",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_numa_affinity",
    "set_seed",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "torchao_required",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]

write_through(__name__)
