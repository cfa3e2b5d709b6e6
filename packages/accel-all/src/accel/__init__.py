"""Everything of accel behind one import: each name is imported from its package when it is first used."""

from accel._version import __version__
from accel_core._lazy import attach

_NAMES = {
    "accel_bigmodel.hooks.align": ["AlignDevicesHook"],
    "accel_bigmodel.hooks.attach": ["align_module_device", "has_offloaded_params"],
    "accel_bigmodel.hooks.hook": [
        "ModelHook", "SequentialHook", "add_hook_to_module", "remove_hook_from_module", "remove_hook_from_submodules",
    ],
    "accel_bigmodel.meta": ["init_empty_weights", "init_on_device"],
    "accel_bigmodel.offload.store": [
        "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict", "load_offloaded_weight",
        "offload_state_dict", "offload_weight", "save_offload_index",
    ],
    "accel_bigmodel.placement": ["retie_parameters", "set_module_tensor_to_device"],
    "accel_core.accelerator": ["Accelerator"],
    "accel_core.checkpoint.names": [
        "MODEL_NAME", "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME",
        "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
        "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    ],
    "accel_core.checkpoint.plain": ["save"],
    "accel_core.comm.batch": [
        "GatheredParameters", "TensorInformation", "concatenate", "find_batch_size", "find_device",
        "get_data_structure", "ignorant_find_batch_size", "initialize_tensors", "is_tensor_information", "listify",
        "pad_input_tensors", "send_to_device", "slice_tensors",
    ],
    "accel_core.comm.collectives": ["broadcast", "copy_tensor_to_devices", "gather", "reduce"],
    "accel_core.comm.objects": ["broadcast_object_list", "gather_object"],
    "accel_core.comm.padding": ["CannotPadNestedTensorWarning", "pad_across_processes"],
    "accel_core.comm.tree": ["honor_type", "is_namedtuple", "is_torch_tensor", "recursively_apply"],
    "accel_core.data.loader": ["DataLoaderShard"],
    "accel_core.errors": [
        "AccelError", "CheckpointDamagedError", "CheckpointError", "CheckpointMismatchError", "CheckpointNotFoundError",
        "CollectiveError", "ConfigurationError", "DataError", "DeviceMapError", "DeviceUnavailableError",
        "DoubleShardingError", "EngineUnavailableError", "LaunchError", "MissingDependencyError", "OffloadError",
        "PreparationError", "QuantizationError", "RankDisagreementError", "RemoteRankError", "StateError",
        "TrackerError", "TrackerInterfaceError", "UnsafeCheckpointError", "UnsupportedTypeError",
    ],
    "accel_core.host.environ": [
        "clear_environment", "convert_dict_to_env_variables", "get_int_from_env", "parse_choice_from_env",
        "parse_flag_from_env", "patch_environment", "purge_accelerate_environment", "str_to_bool",
    ],
    "accel_core.modules.compilation": ["compile_regions", "has_compiled_regions", "is_compiled_module"],
    "accel_core.modules.sizes": ["convert_file_size_to_int", "dtype_byte_size", "id_tensor_storage"],
    "accel_core.modules.ties": ["find_tied_parameters"],
    "accel_core.modules.traversal": ["get_module_children_bottom_up", "named_module_tensors"],
    "accel_core.modules.unwrap": ["extract_model_from_parallel"],
    "accel_core.optim.optimizer": ["AcceleratedOptimizer"],
    "accel_core.optim.scheduler": ["AcceleratedScheduler"],
    "accel_core.options.enums": [
        "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
        "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
    ],
    "accel_core.plugins.accumulation": ["GradientAccumulationPlugin"],
    "accel_core.plugins.compilation": ["TorchDynamoPlugin"],
    "accel_core.plugins.fp8": ["AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"],
    "accel_core.plugins.fsdp": ["FullyShardedDataParallelPlugin"],
    "accel_core.plugins.handlers": [
        "AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "InitProcessGroupKwargs",
        "KwargsHandler", "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "ProfileKwargs",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ],
    "accel_core.plugins.loading": ["DataLoaderConfiguration"],
    "accel_core.plugins.parallelism": [
        "DeepSpeedSequenceParallelConfig", "ParallelismConfig", "TorchContextParallelConfig",
        "TorchTensorParallelConfig", "TorchTensorParallelPlugin",
    ],
    "accel_core.plugins.project": ["ProjectConfiguration"],
    "accel_core.process.control": ["wait_for_everyone"],
    "accel_core.profiling": ["PROFILE_PATTERN_NAME"],
    "accel_core.state.gradient": ["GradientState"],
    "accel_core.state.process": ["PartialState"],
    "accel_core.state.run": ["AcceleratorState"],
    "accel_core.tracking.discovery": ["get_available_trackers"],
    "accel_core.tracking.tracker": ["GeneralTracker"],
    "accel_launch.contributed": ["load"],
}

__getattr__, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_all, "__version__"]
