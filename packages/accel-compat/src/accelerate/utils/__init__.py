"""The names of `accelerate.utils` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.checkpoint.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.checkpoint.load import load_offloaded_weights as load_offloaded_weights
from accel_bigmodel.checkpoint.read import load_state_dict as load_state_dict
from accel_bigmodel.device_map.balance import get_balanced_memory as get_balanced_memory
from accel_bigmodel.device_map.check import check_device_map as check_device_map
from accel_bigmodel.device_map.check import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.device_map.ties import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel_bigmodel.hooks.attach import align_module_device as align_module_device
from accel_bigmodel.hooks.attach import has_offloaded_params as has_offloaded_params
from accel_bigmodel.hooks.state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accel_bigmodel.memory import get_max_memory as get_max_memory
from accel_bigmodel.offload.store import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_bigmodel.offload.store import PrefixedDataset as PrefixedDataset
from accel_bigmodel.offload.store import extract_submodules_state_dict as extract_submodules_state_dict
from accel_bigmodel.offload.store import load_offloaded_weight as load_offloaded_weight
from accel_bigmodel.offload.store import offload_state_dict as offload_state_dict
from accel_bigmodel.offload.store import offload_weight as offload_weight
from accel_bigmodel.offload.store import save_offload_index as save_offload_index
from accel_bigmodel.placement import retie_parameters as retie_parameters
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_bigmodel.sizes import compute_module_sizes as compute_module_sizes
from accel_bigmodel.sizes import get_max_layer_size as get_max_layer_size
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
from accel_core.checkpoint.plain import load as load
from accel_core.checkpoint.plain import save as save
from accel_core.comm.batch import concatenate as concatenate
from accel_core.comm.batch import find_batch_size as find_batch_size
from accel_core.comm.batch import find_device as find_device
from accel_core.comm.batch import listify as listify
from accel_core.comm.batch import pad_input_tensors as pad_input_tensors
from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.batch import slice_tensors as slice_tensors
from accel_core.comm.collectives import broadcast as broadcast
from accel_core.comm.collectives import gather as gather
from accel_core.comm.collectives import reduce as reduce
from accel_core.comm.objects import broadcast_object_list as broadcast_object_list
from accel_core.comm.objects import gather_object as gather_object
from accel_core.comm.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_core.comm.padding import pad_across_processes as pad_across_processes
from accel_core.comm.tree import honor_type as honor_type
from accel_core.comm.tree import is_namedtuple as is_namedtuple
from accel_core.comm.tree import is_torch_tensor as is_torch_tensor
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.devices.memory import find_executable_batch_size as find_executable_batch_size
from accel_core.devices.memory import release_memory as release_memory
from accel_core.host.affinity import set_numa_affinity as set_numa_affinity
from accel_core.host.availability import is_cuda_available as is_cuda_available
from accel_core.host.availability import is_deepspeed_available as is_deepspeed_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.host.availability import is_msamp_available as is_msamp_available
from accel_core.host.availability import is_timm_available as is_timm_available
from accel_core.host.availability import is_torchao_available as is_torchao_available
from accel_core.host.availability import is_transformer_engine_available as is_transformer_engine_available
from accel_core.host.availability import is_transformers_available as is_transformers_available
from accel_core.host.colab import install_xla as install_xla
from accel_core.host.environ import clear_environment as clear_environment
from accel_core.host.environ import patch_environment as patch_environment
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.modules.compilation import compile_regions as compile_regions
from accel_core.modules.compilation import has_compiled_regions as has_compiled_regions
from accel_core.modules.compilation import is_compiled_module as is_compiled_module
from accel_core.modules.sizes import convert_file_size_to_int as convert_file_size_to_int
from accel_core.modules.sizes import dtype_byte_size as dtype_byte_size
from accel_core.modules.sizes import id_tensor_storage as id_tensor_storage
from accel_core.modules.ties import find_tied_parameters as find_tied_parameters
from accel_core.modules.traversal import named_module_tensors as named_module_tensors
from accel_core.modules.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_core.options.enums import CustomDtype as CustomDtype
from accel_core.options.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import LoggerType as LoggerType
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.options.enums import RNGType as RNGType
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_core.plugins.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from accel_core.plugins.fp8 import AORecipeKwargs as AORecipeKwargs
from accel_core.plugins.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accel_core.plugins.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel_core.plugins.fp8 import TERecipeKwargs as TERecipeKwargs
from accel_core.plugins.handlers import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accel_core.plugins.handlers import AutocastKwargs as AutocastKwargs
from accel_core.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_core.plugins.handlers import GradScalerKwargs as GradScalerKwargs
from accel_core.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_core.plugins.handlers import KwargsHandler as KwargsHandler
from accel_core.plugins.handlers import ProfileKwargs as ProfileKwargs
from accel_core.plugins.loading import DataLoaderConfiguration as DataLoaderConfiguration
from accel_core.plugins.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_core.plugins.parallelism import ParallelismConfig as ParallelismConfig
from accel_core.plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from accel_core.plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_core.plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel_core.plugins.project import ProjectConfiguration as ProjectConfiguration
from accel_core.precision.autocast import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_core.precision.autocast import convert_to_fp32 as convert_to_fp32
from accel_core.precision.fp8.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel_core.precision.fp8.torchao import has_ao_layers as has_ao_layers
from accel_core.precision.fp8.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accel_core.precision.fp8.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accel_core.precision.fp8.transformer_engine import convert_model as convert_model
from accel_core.precision.fp8.transformer_engine import has_transformer_engine_layers as has_transformer_engine_layers
from accel_core.precision.scaler import get_grad_scaler as get_grad_scaler
from accel_core.random import set_seed as set_seed
from accel_core.random import synchronize_rng_state as synchronize_rng_state
from accel_core.random import synchronize_rng_states as synchronize_rng_states
from accel_core.state.process import wait_for_everyone as wait_for_everyone
from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_parallel.plugin import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from accel_parallel.plugin import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from accelerate import _rebinding
from accelerate._availability import *
from accelerate._constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate._constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._deepspeed import compile_regions_deepspeed as compile_regions_deepspeed
from accelerate._elastic import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from accelerate._environment import convert_dict_to_env_variables as convert_dict_to_env_variables
from accelerate._environment import get_int_from_env as get_int_from_env
from accelerate._environment import parse_choice_from_env as parse_choice_from_env
from accelerate._environment import parse_flag_from_env as parse_flag_from_env
from accelerate._environment import purge_accelerate_environment as purge_accelerate_environment
from accelerate._fsdp import compile_regions_fsdp2 as compile_regions_fsdp2
from accelerate._fsdp import ensure_weights_retied as ensure_weights_retied
from accelerate._fsdp import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate._fsdp import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate._fsdp import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate._fsdp import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate._fsdp import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accelerate._fsdp import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate._fsdp import load_fsdp_model as load_fsdp_model
from accelerate._fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate._fsdp import save_fsdp_model as save_fsdp_model
from accelerate._fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from accelerate._kernel import check_os_kernel as check_os_kernel
from accelerate._machine import are_libraries_initialized as are_libraries_initialized
from accelerate._machine import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate._machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate._machine import convert_bytes as convert_bytes
from accelerate._machine import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate._machine import get_current_device_type as get_current_device_type
from accelerate._machine import get_gpu_info as get_gpu_info
from accelerate._machine import is_port_in_use as is_port_in_use
from accelerate._merging import merge_dicts as merge_dicts
from accelerate._models import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accelerate._models import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate._models import is_peft_model as is_peft_model
from accelerate._names import get_pretty_name as get_pretty_name
from accelerate._names import recursive_getattr as recursive_getattr
from accelerate._operations import GatheredParameters as GatheredParameters
from accelerate._operations import TensorInformation as TensorInformation
from accelerate._operations import copy_tensor_to_devices as copy_tensor_to_devices
from accelerate._operations import get_data_structure as get_data_structure
from accelerate._operations import ignorant_find_batch_size as ignorant_find_batch_size
from accelerate._operations import initialize_tensors as initialize_tensors
from accelerate._operations import is_tensor_information as is_tensor_information
from accelerate._precision import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from accelerate._precision import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from accelerate._sharded_models import get_model_tp_size as get_model_tp_size
from accelerate._sharded_models import model_has_dtensor as model_has_dtensor
from accelerate.utils import ao as ao
from accelerate.utils import bnb as bnb
from accelerate.utils import constants as constants
from accelerate.utils import dataclasses as dataclasses
from accelerate.utils import deepspeed as deepspeed
from accelerate.utils import environment as environment
from accelerate.utils import fsdp_utils as fsdp_utils
from accelerate.utils import imports as imports
from accelerate.utils import launch as launch
from accelerate.utils import megatron_lm as megatron_lm
from accelerate.utils import memory as memory
from accelerate.utils import modeling as modeling
from accelerate.utils import offload as offload
from accelerate.utils import operations as operations
from accelerate.utils import other as other
from accelerate.utils import random as random
from accelerate.utils import torch_xla as torch_xla
from accelerate.utils import transformer_engine as transformer_engine
from accelerate.utils import versions as versions
from accelerate.utils.tqdm import tqdm as tqdm

if is_deepspeed_available():
    from accelerate.utils.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin


_LATER = {
    "accel_deepspeed": [  # engines that may not be installed
        "DeepSpeedEngineWrapper",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedPlugin",
        "DeepSpeedSchedulerWrapper",
        "DummyOptim",
        "DummyScheduler",
        "HfDeepSpeedConfig",
        "map_pytorch_optim_to_deepspeed",
    ],
    "accel_megatron": [
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler",
        "MegatronLMPlugin",
        "T5TrainStep",
        "add_model_config_to_megatron_parser",
        "avg_losses_across_data_parallel_group",
    ],
    "accel_launch.notebook": [  # what starts processes, of no use in those that were started
        "PrepareForLaunch",
    ],
    "accel_launch.settings.config": [
        "write_basic_config",
    ],
    "accel_quant.config": ["BnbQuantizationConfig"],  # for models that are packed
    "accel_quant.layers": ["has_4bit_bnb_layers"],
    "accel_quant.load": ["load_and_quantize_model"],
    "accelerate._launch_preparation": [  # brings all launchers
        "prepare_deepspeed_cmd_env",
        "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs",
        "prepare_simple_launcher_cmd_env",
        "prepare_tpu",
    ],
    "accelerate._weights_merging": [  # brings the readers of shards
        "merge_fsdp_weights",
    ],
}
if not is_deepspeed_available():
    _LATER["accel_deepspeed"] = ["DeepSpeedPlugin"]  # in Accelerate, too, the others are there with DeepSpeed only
_rebinding.write_through(__name__, _LATER)
