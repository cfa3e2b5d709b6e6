"""The names of accel for type checkers and editors; `__init__.py` imports them when they are first used."""

from accel._version import __version__ as __version__
from accel_bigmodel.hooks.align import (
    AlignDevicesHook as AlignDevicesHook,
)
from accel_bigmodel.hooks.attach import (
    align_module_device as align_module_device,
)
from accel_bigmodel.hooks.attach import (
    has_offloaded_params as has_offloaded_params,
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
from accel_bigmodel.placement import (
    retie_parameters as retie_parameters,
)
from accel_bigmodel.placement import (
    set_module_tensor_to_device as set_module_tensor_to_device,
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
from accel_core.data.loader import (
    DataLoaderShard as DataLoaderShard,
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
from accel_core.modules.compilation import (
    compile_regions as compile_regions,
)
from accel_core.modules.compilation import (
    has_compiled_regions as has_compiled_regions,
)
from accel_core.modules.compilation import (
    is_compiled_module as is_compiled_module,
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
from accel_core.optim.optimizer import (
    AcceleratedOptimizer as AcceleratedOptimizer,
)
from accel_core.optim.scheduler import (
    AcceleratedScheduler as AcceleratedScheduler,
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
from accel_core.plugins.accumulation import (
    GradientAccumulationPlugin as GradientAccumulationPlugin,
)
from accel_core.plugins.compilation import (
    TorchDynamoPlugin as TorchDynamoPlugin,
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
from accel_core.process.control import (
    wait_for_everyone as wait_for_everyone,
)
from accel_core.profiling import (
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
)
from accel_core.state.gradient import (
    GradientState as GradientState,
)
from accel_core.state.process import (
    PartialState as PartialState,
)
from accel_core.state.run import (
    AcceleratorState as AcceleratorState,
)
from accel_core.tracking.discovery import (
    get_available_trackers as get_available_trackers,
)
from accel_core.tracking.tracker import (
    GeneralTracker as GeneralTracker,
)
from accel_launch.contributed import (
    load as load,
)
