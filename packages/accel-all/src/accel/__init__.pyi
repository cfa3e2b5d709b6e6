"""The names of accel for type checkers and editors; `__init__.py` imports them when they are first used."""

from accel._version import __version__ as __version__
from accel_bigmodel.checkpoint.load import (
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from accel_bigmodel.checkpoint.load import (
    load_offloaded_weights as load_offloaded_weights,
)
from accel_bigmodel.checkpoint.read import (
    load_state_dict as load_state_dict,
)
from accel_bigmodel.device_map.balance import (
    get_balanced_memory as get_balanced_memory,
)
from accel_bigmodel.device_map.check import (
    check_device_map as check_device_map,
)
from accel_bigmodel.device_map.check import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel_bigmodel.device_map.infer import (
    infer_auto_device_map as infer_auto_device_map,
)
from accel_bigmodel.device_map.ties import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
)
from accel_bigmodel.dispatch import (
    cpu_offload as cpu_offload,
)
from accel_bigmodel.dispatch import (
    cpu_offload_with_hook as cpu_offload_with_hook,
)
from accel_bigmodel.dispatch import (
    disk_offload as disk_offload,
)
from accel_bigmodel.dispatch import (
    dispatch_model as dispatch_model,
)
from accel_bigmodel.dispatch import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from accel_bigmodel.hooks.align import (
    AlignDevicesHook as AlignDevicesHook,
)
from accel_bigmodel.hooks.attach import (
    align_module_device as align_module_device,
)
from accel_bigmodel.hooks.attach import (
    has_offloaded_params as has_offloaded_params,
)
from accel_bigmodel.hooks.cpu_offload import (
    CpuOffload as CpuOffload,
)
from accel_bigmodel.hooks.cpu_offload import (
    UserCpuOffloadHook as UserCpuOffloadHook,
)
from accel_bigmodel.hooks.hook import (
    ModelHook as ModelHook,
)
from accel_bigmodel.hooks.hook import (
    SequentialHook as SequentialHook,
)
from accel_bigmodel.hooks.hook import (
    add_hook_to_module as add_hook_to_module,
)
from accel_bigmodel.hooks.hook import (
    remove_hook_from_module as remove_hook_from_module,
)
from accel_bigmodel.hooks.hook import (
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from accel_bigmodel.memory import (
    get_max_memory as get_max_memory,
)
from accel_bigmodel.meta import (
    init_empty_weights as init_empty_weights,
)
from accel_bigmodel.meta import (
    init_on_device as init_on_device,
)
from accel_bigmodel.offload.store import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
)
from accel_bigmodel.offload.store import (
    PrefixedDataset as PrefixedDataset,
)
from accel_bigmodel.offload.store import (
    extract_submodules_state_dict as extract_submodules_state_dict,
)
from accel_bigmodel.offload.store import (
    load_offloaded_weight as load_offloaded_weight,
)
from accel_bigmodel.offload.store import (
    offload_state_dict as offload_state_dict,
)
from accel_bigmodel.offload.store import (
    offload_weight as offload_weight,
)
from accel_bigmodel.offload.store import (
    save_offload_index as save_offload_index,
)
from accel_bigmodel.pipeline import (
    prepare_pippy as prepare_pippy,
)
from accel_bigmodel.placement import (
    retie_parameters as retie_parameters,
)
from accel_bigmodel.placement import (
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accel_bigmodel.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
)
from accel_bigmodel.sizes import (
    compute_module_sizes as compute_module_sizes,
)
from accel_bigmodel.sizes import (
    get_max_layer_size as get_max_layer_size,
)
from accel_core.accelerator import (
    Accelerator as Accelerator,
)
from accel_core.checkpoint.names import (
    MODEL_NAME as MODEL_NAME,
)
from accel_core.checkpoint.names import (
    OPTIMIZER_NAME as OPTIMIZER_NAME,
)
from accel_core.checkpoint.names import (
    RNG_STATE_NAME as RNG_STATE_NAME,
)
from accel_core.checkpoint.names import (
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
)
from accel_core.checkpoint.names import (
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
)
from accel_core.checkpoint.names import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
)
from accel_core.checkpoint.names import (
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
)
from accel_core.checkpoint.names import (
    SAMPLER_NAME as SAMPLER_NAME,
)
from accel_core.checkpoint.names import (
    SCALER_NAME as SCALER_NAME,
)
from accel_core.checkpoint.names import (
    SCHEDULER_NAME as SCHEDULER_NAME,
)
from accel_core.checkpoint.names import (
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
)
from accel_core.checkpoint.names import (
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accel_core.checkpoint.names import (
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from accel_core.checkpoint.plain import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from accel_core.checkpoint.plain import (
    load as load,
)
from accel_core.checkpoint.plain import (
    save as save,
)
from accel_core.comm.batch import (
    GatheredParameters as GatheredParameters,
)
from accel_core.comm.batch import (
    TensorInformation as TensorInformation,
)
from accel_core.comm.batch import (
    concatenate as concatenate,
)
from accel_core.comm.batch import (
    find_batch_size as find_batch_size,
)
from accel_core.comm.batch import (
    find_device as find_device,
)
from accel_core.comm.batch import (
    get_data_structure as get_data_structure,
)
from accel_core.comm.batch import (
    ignorant_find_batch_size as ignorant_find_batch_size,
)
from accel_core.comm.batch import (
    initialize_tensors as initialize_tensors,
)
from accel_core.comm.batch import (
    is_tensor_information as is_tensor_information,
)
from accel_core.comm.batch import (
    listify as listify,
)
from accel_core.comm.batch import (
    pad_input_tensors as pad_input_tensors,
)
from accel_core.comm.batch import (
    send_to_device as send_to_device,
)
from accel_core.comm.batch import (
    slice_tensors as slice_tensors,
)
from accel_core.comm.collectives import (
    broadcast as broadcast,
)
from accel_core.comm.collectives import (
    copy_tensor_to_devices as copy_tensor_to_devices,
)
from accel_core.comm.collectives import (
    gather as gather,
)
from accel_core.comm.collectives import (
    reduce as reduce,
)
from accel_core.comm.objects import (
    broadcast_object_list as broadcast_object_list,
)
from accel_core.comm.objects import (
    gather_object as gather_object,
)
from accel_core.comm.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
)
from accel_core.comm.padding import (
    pad_across_processes as pad_across_processes,
)
from accel_core.comm.tree import (
    honor_type as honor_type,
)
from accel_core.comm.tree import (
    is_namedtuple as is_namedtuple,
)
from accel_core.comm.tree import (
    is_torch_tensor as is_torch_tensor,
)
from accel_core.comm.tree import (
    recursively_apply as recursively_apply,
)
from accel_core.data.dispatcher import (
    DataLoaderDispatcher as DataLoaderDispatcher,
)
from accel_core.data.loader import (
    DataLoaderShard as DataLoaderShard,
)
from accel_core.data.prepare import (
    prepare_data_loader as prepare_data_loader,
)
from accel_core.data.skip import (
    skip_first_batches as skip_first_batches,
)
from accel_core.devices.memory import (
    find_executable_batch_size as find_executable_batch_size,
)
from accel_core.devices.memory import (
    release_memory as release_memory,
)
from accel_core.errors import (
    AccelError as AccelError,
)
from accel_core.errors import (
    CheckpointDamagedError as CheckpointDamagedError,
)
from accel_core.errors import (
    CheckpointError as CheckpointError,
)
from accel_core.errors import (
    CheckpointMismatchError as CheckpointMismatchError,
)
from accel_core.errors import (
    CheckpointNotFoundError as CheckpointNotFoundError,
)
from accel_core.errors import (
    CollectiveError as CollectiveError,
)
from accel_core.errors import (
    ConfigurationError as ConfigurationError,
)
from accel_core.errors import (
    DataError as DataError,
)
from accel_core.errors import (
    DeviceMapError as DeviceMapError,
)
from accel_core.errors import (
    DeviceUnavailableError as DeviceUnavailableError,
)
from accel_core.errors import (
    DoubleShardingError as DoubleShardingError,
)
from accel_core.errors import (
    EngineUnavailableError as EngineUnavailableError,
)
from accel_core.errors import (
    LaunchError as LaunchError,
)
from accel_core.errors import (
    MissingDependencyError as MissingDependencyError,
)
from accel_core.errors import (
    OffloadError as OffloadError,
)
from accel_core.errors import (
    OutOfMemoryError as OutOfMemoryError,
)
from accel_core.errors import (
    PreparationError as PreparationError,
)
from accel_core.errors import (
    QuantizationError as QuantizationError,
)
from accel_core.errors import (
    RankDisagreementError as RankDisagreementError,
)
from accel_core.errors import (
    RemoteRankError as RemoteRankError,
)
from accel_core.errors import (
    StateError as StateError,
)
from accel_core.errors import (
    TrackerError as TrackerError,
)
from accel_core.errors import (
    TrackerInterfaceError as TrackerInterfaceError,
)
from accel_core.errors import (
    UnsafeCheckpointError as UnsafeCheckpointError,
)
from accel_core.errors import (
    UnsupportedTypeError as UnsupportedTypeError,
)
from accel_core.host.affinity import (
    are_libraries_initialized as are_libraries_initialized,
)
from accel_core.host.affinity import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
)
from accel_core.host.affinity import (
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
)
from accel_core.host.affinity import (
    get_cpu_distributed_information as get_cpu_distributed_information,
)
from accel_core.host.affinity import (
    get_current_device_type as get_current_device_type,
)
from accel_core.host.affinity import (
    get_gpu_info as get_gpu_info,
)
from accel_core.host.affinity import (
    set_numa_affinity as set_numa_affinity,
)
from accel_core.host.availability import (
    deepspeed_required as deepspeed_required,
)
from accel_core.host.availability import (
    is_4bit_bnb_available as is_4bit_bnb_available,
)
from accel_core.host.availability import (
    is_8bit_bnb_available as is_8bit_bnb_available,
)
from accel_core.host.availability import (
    is_aim_available as is_aim_available,
)
from accel_core.host.availability import (
    is_amdsmi_available as is_amdsmi_available,
)
from accel_core.host.availability import (
    is_bf16_available as is_bf16_available,
)
from accel_core.host.availability import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accel_core.host.availability import (
    is_bnb_available as is_bnb_available,
)
from accel_core.host.availability import (
    is_boto3_available as is_boto3_available,
)
from accel_core.host.availability import (
    is_clearml_available as is_clearml_available,
)
from accel_core.host.availability import (
    is_comet_ml_available as is_comet_ml_available,
)
from accel_core.host.availability import (
    is_cuda_available as is_cuda_available,
)
from accel_core.host.availability import (
    is_datasets_available as is_datasets_available,
)
from accel_core.host.availability import (
    is_deepspeed_available as is_deepspeed_available,
)
from accel_core.host.availability import (
    is_dvclive_available as is_dvclive_available,
)
from accel_core.host.availability import (
    is_fp8_available as is_fp8_available,
)
from accel_core.host.availability import (
    is_fp16_available as is_fp16_available,
)
from accel_core.host.availability import (
    is_habana_gaudi1 as is_habana_gaudi1,
)
from accel_core.host.availability import (
    is_hpu_available as is_hpu_available,
)
from accel_core.host.availability import (
    is_import_timer_available as is_import_timer_available,
)
from accel_core.host.availability import (
    is_lomo_available as is_lomo_available,
)
from accel_core.host.availability import (
    is_matplotlib_available as is_matplotlib_available,
)
from accel_core.host.availability import (
    is_megatron_lm_available as is_megatron_lm_available,
)
from accel_core.host.availability import (
    is_mlflow_available as is_mlflow_available,
)
from accel_core.host.availability import (
    is_mlu_available as is_mlu_available,
)
from accel_core.host.availability import (
    is_mps_available as is_mps_available,
)
from accel_core.host.availability import (
    is_msamp_available as is_msamp_available,
)
from accel_core.host.availability import (
    is_musa_available as is_musa_available,
)
from accel_core.host.availability import (
    is_neuron_available as is_neuron_available,
)
from accel_core.host.availability import (
    is_npu_available as is_npu_available,
)
from accel_core.host.availability import (
    is_pandas_available as is_pandas_available,
)
from accel_core.host.availability import (
    is_peft_available as is_peft_available,
)
from accel_core.host.availability import (
    is_pippy_available as is_pippy_available,
)
from accel_core.host.availability import (
    is_pynvml_available as is_pynvml_available,
)
from accel_core.host.availability import (
    is_pytest_available as is_pytest_available,
)
from accel_core.host.availability import (
    is_rich_available as is_rich_available,
)
from accel_core.host.availability import (
    is_rocm_available as is_rocm_available,
)
from accel_core.host.availability import (
    is_sagemaker_available as is_sagemaker_available,
)
from accel_core.host.availability import (
    is_schedulefree_available as is_schedulefree_available,
)
from accel_core.host.availability import (
    is_sdaa_available as is_sdaa_available,
)
from accel_core.host.availability import (
    is_swanlab_available as is_swanlab_available,
)
from accel_core.host.availability import (
    is_tensorboard_available as is_tensorboard_available,
)
from accel_core.host.availability import (
    is_timm_available as is_timm_available,
)
from accel_core.host.availability import (
    is_torch_xla_available as is_torch_xla_available,
)
from accel_core.host.availability import (
    is_torchao_available as is_torchao_available,
)
from accel_core.host.availability import (
    is_torchdata_available as is_torchdata_available,
)
from accel_core.host.availability import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accel_core.host.availability import (
    is_torchvision_available as is_torchvision_available,
)
from accel_core.host.availability import (
    is_trackio_available as is_trackio_available,
)
from accel_core.host.availability import (
    is_transformer_engine_available as is_transformer_engine_available,
)
from accel_core.host.availability import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from accel_core.host.availability import (
    is_transformers_available as is_transformers_available,
)
from accel_core.host.availability import (
    is_triton_available as is_triton_available,
)
from accel_core.host.availability import (
    is_wandb_available as is_wandb_available,
)
from accel_core.host.availability import (
    is_weights_only_available as is_weights_only_available,
)
from accel_core.host.availability import (
    is_xccl_available as is_xccl_available,
)
from accel_core.host.availability import (
    is_xpu_available as is_xpu_available,
)
from accel_core.host.availability import (
    torchao_required as torchao_required,
)
from accel_core.host.colab import (
    install_xla as install_xla,
)
from accel_core.host.environ import (
    clear_environment as clear_environment,
)
from accel_core.host.environ import (
    convert_dict_to_env_variables as convert_dict_to_env_variables,
)
from accel_core.host.environ import (
    get_int_from_env as get_int_from_env,
)
from accel_core.host.environ import (
    parse_choice_from_env as parse_choice_from_env,
)
from accel_core.host.environ import (
    parse_flag_from_env as parse_flag_from_env,
)
from accel_core.host.environ import (
    patch_environment as patch_environment,
)
from accel_core.host.environ import (
    purge_accelerate_environment as purge_accelerate_environment,
)
from accel_core.host.environ import (
    str_to_bool as str_to_bool,
)
from accel_core.host.kernel import (
    check_os_kernel as check_os_kernel,
)
from accel_core.host.ports import (
    is_port_in_use as is_port_in_use,
)
from accel_core.host.versions import (
    compare_versions as compare_versions,
)
from accel_core.host.versions import (
    is_torch_version as is_torch_version,
)
from accel_core.logging import (
    get_logger as get_logger,
)
from accel_core.mesh.tensor import (
    get_model_tp_size as get_model_tp_size,
)
from accel_core.mesh.tensor import (
    model_has_dtensor as model_has_dtensor,
)
from accel_core.modules.compilation import (
    compile_regions as compile_regions,
)
from accel_core.modules.compilation import (
    has_compiled_regions as has_compiled_regions,
)
from accel_core.modules.compilation import (
    is_compiled_module as is_compiled_module,
)
from accel_core.modules.names import (
    get_pretty_name as get_pretty_name,
)
from accel_core.modules.names import (
    recursive_getattr as recursive_getattr,
)
from accel_core.modules.sizes import (
    convert_bytes as convert_bytes,
)
from accel_core.modules.sizes import (
    convert_file_size_to_int as convert_file_size_to_int,
)
from accel_core.modules.sizes import (
    dtype_byte_size as dtype_byte_size,
)
from accel_core.modules.sizes import (
    id_tensor_storage as id_tensor_storage,
)
from accel_core.modules.ties import (
    find_tied_parameters as find_tied_parameters,
)
from accel_core.modules.traversal import (
    get_module_children_bottom_up as get_module_children_bottom_up,
)
from accel_core.modules.traversal import (
    named_module_tensors as named_module_tensors,
)
from accel_core.modules.unwrap import (
    extract_model_from_parallel as extract_model_from_parallel,
)
from accel_core.modules.unwrap import (
    is_peft_model as is_peft_model,
)
from accel_core.optim.local_sgd import (
    LocalSGD as LocalSGD,
)
from accel_core.optim.optimizer import (
    AcceleratedOptimizer as AcceleratedOptimizer,
)
from accel_core.optim.scheduler import (
    AcceleratedScheduler as AcceleratedScheduler,
)
from accel_core.options.elastic import (
    TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS,
)
from accel_core.options.enums import (
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
)
from accel_core.options.enums import (
    ComputeEnvironment as ComputeEnvironment,
)
from accel_core.options.enums import (
    CustomDtype as CustomDtype,
)
from accel_core.options.enums import (
    DDPCommunicationHookType as DDPCommunicationHookType,
)
from accel_core.options.enums import (
    DistributedType as DistributedType,
)
from accel_core.options.enums import (
    DynamoBackend as DynamoBackend,
)
from accel_core.options.enums import (
    LoggerType as LoggerType,
)
from accel_core.options.enums import (
    PrecisionType as PrecisionType,
)
from accel_core.options.enums import (
    RNGType as RNGType,
)
from accel_core.options.enums import (
    SageMakerDistributedType as SageMakerDistributedType,
)
from accel_core.options.merge import (
    merge_dicts as merge_dicts,
)
from accel_core.plugins.accumulation import (
    GradientAccumulationPlugin as GradientAccumulationPlugin,
)
from accel_core.plugins.compilation import (
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from accel_core.plugins.deepspeed import (
    DeepSpeedPlugin as DeepSpeedPlugin,
)
from accel_core.plugins.deepspeed import (
    DummyOptim as DummyOptim,
)
from accel_core.plugins.deepspeed import (
    DummyScheduler as DummyScheduler,
)
from accel_core.plugins.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
)
from accel_core.plugins.fp8 import (
    FP8RecipeKwargs as FP8RecipeKwargs,
)
from accel_core.plugins.fp8 import (
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
)
from accel_core.plugins.fp8 import (
    TERecipeKwargs as TERecipeKwargs,
)
from accel_core.plugins.fsdp import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from accel_core.plugins.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accel_core.plugins.fsdp import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accel_core.plugins.handlers import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accel_core.plugins.handlers import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accel_core.plugins.handlers import (
    AutocastKwargs as AutocastKwargs,
)
from accel_core.plugins.handlers import (
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from accel_core.plugins.handlers import (
    GradScalerKwargs as GradScalerKwargs,
)
from accel_core.plugins.handlers import (
    InitProcessGroupKwargs as InitProcessGroupKwargs,
)
from accel_core.plugins.handlers import (
    KwargsHandler as KwargsHandler,
)
from accel_core.plugins.handlers import (
    ProfileKwargs as ProfileKwargs,
)
from accel_core.plugins.loading import (
    DataLoaderConfiguration as DataLoaderConfiguration,
)
from accel_core.plugins.megatron import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accel_core.plugins.megatron import (
    MegatronLMPlugin as MegatronLMPlugin,
)
from accel_core.plugins.megatron_models import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accel_core.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accel_core.plugins.parallelism import (
    ParallelismConfig as ParallelismConfig,
)
from accel_core.plugins.parallelism import (
    TorchContextParallelConfig as TorchContextParallelConfig,
)
from accel_core.plugins.parallelism import (
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from accel_core.plugins.parallelism import (
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accel_core.plugins.project import (
    ProjectConfiguration as ProjectConfiguration,
)
from accel_core.precision.autocast import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel_core.precision.fp8.torchao import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
)
from accel_core.precision.fp8.torchao import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from accel_core.precision.fp8.torchao import (
    has_ao_layers as has_ao_layers,
)
from accel_core.precision.fp8.transformer_engine import (
    apply_fp8_autowrap as apply_fp8_autowrap,
)
from accel_core.precision.fp8.transformer_engine import (
    contextual_fp8_autocast as contextual_fp8_autocast,
)
from accel_core.precision.fp8.transformer_engine import (
    convert_model as convert_model,
)
from accel_core.precision.fp8.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accel_core.precision.outputs import (
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
)
from accel_core.precision.outputs import (
    convert_to_fp32 as convert_to_fp32,
)
from accel_core.precision.scaler import (
    get_grad_scaler as get_grad_scaler,
)
from accel_core.profiling import (
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
)
from accel_core.random import (
    set_seed as set_seed,
)
from accel_core.random import (
    synchronize_rng_state as synchronize_rng_state,
)
from accel_core.random import (
    synchronize_rng_states as synchronize_rng_states,
)
from accel_core.state.gradient import (
    GradientState as GradientState,
)
from accel_core.state.process import (
    PartialState as PartialState,
)
from accel_core.state.process import (
    wait_for_everyone as wait_for_everyone,
)
from accel_core.state.run import (
    AcceleratorState as AcceleratorState,
)
from accel_core.tqdm import (
    tqdm as tqdm,
)
from accel_core.tracking.discovery import (
    get_available_trackers as get_available_trackers,
)
from accel_core.tracking.tracker import (
    GeneralTracker as GeneralTracker,
)
from accel_launch.notebook import (
    PrepareForLaunch as PrepareForLaunch,
)
from accel_launch.notebook import (
    debug_launcher as debug_launcher,
)
from accel_launch.notebook import (
    notebook_launcher as notebook_launcher,
)
from accel_launch.preparation import (
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
)
from accel_launch.preparation import (
    prepare_multi_gpu_env as prepare_multi_gpu_env,
)
from accel_launch.preparation import (
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
)
from accel_launch.preparation import (
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
)
from accel_launch.preparation import (
    prepare_tpu as prepare_tpu,
)
from accel_launch.settings.config import (
    write_basic_config as write_basic_config,
)
from accel_quant.config import (
    BnbQuantizationConfig as BnbQuantizationConfig,
)
from accel_quant.layers import (
    has_4bit_bnb_layers as has_4bit_bnb_layers,
)
from accel_quant.load import (
    load_and_quantize_model as load_and_quantize_model,
)
