"""The names of `accelerate.accelerator` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.hooks.attach import has_offloaded_params as has_offloaded_params
from accel_bigmodel.hooks.state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accel_core.accelerator import Accelerator as Accelerator
from accel_core.checkpoint.names import MODEL_NAME as MODEL_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_core.checkpoint.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accel_core.checkpoint.names import SCALER_NAME as SCALER_NAME
from accel_core.checkpoint.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accel_core.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accel_core.checkpoint.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accel_core.checkpoint.plain import save as save
from accel_core.comm.collectives import gather as gather
from accel_core.comm.collectives import reduce as reduce
from accel_core.comm.objects import gather_object as gather_object
from accel_core.comm.padding import pad_across_processes as pad_across_processes
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accel_core.data.prepare import prepare_data_loader as prepare_data_loader
from accel_core.data.skip import skip_first_batches as skip_first_batches
from accel_core.devices.memory import release_memory as release_memory
from accel_core.host.availability import is_deepspeed_available as is_deepspeed_available
from accel_core.host.availability import is_msamp_available as is_msamp_available
from accel_core.host.availability import is_torchao_available as is_torchao_available
from accel_core.host.availability import is_transformer_engine_available as is_transformer_engine_available
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.logging import get_logger as get_logger
from accel_core.modules.compilation import compile_regions as compile_regions
from accel_core.modules.compilation import is_compiled_module as is_compiled_module
from accel_core.modules.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import FP8BackendType as FP8BackendType
from accel_core.options.enums import LoggerType as LoggerType
from accel_core.options.enums import PrecisionType as PrecisionType
from accel_core.options.enums import RNGType as RNGType
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
from accel_core.plugins.parallelism import ParallelismConfig as ParallelismConfig
from accel_core.plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel_core.plugins.project import ProjectConfiguration as ProjectConfiguration
from accel_core.precision.autocast import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_core.precision.fp8.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel_core.precision.fp8.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accel_core.precision.fp8.transformer_engine import convert_model as convert_model
from accel_core.precision.scaler import get_grad_scaler as get_grad_scaler
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.process import PartialState as PartialState
from accel_core.state.process import wait_for_everyone as wait_for_everyone
from accel_core.state.run import AcceleratorState as AcceleratorState
from accel_core.tracking.discovery import filter_trackers as filter_trackers
from accel_core.tracking.tracker import GeneralTracker as GeneralTracker
from accel_parallel.options import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accel_parallel.options import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate import _rebinding
from accelerate._availability import is_bf16_available as is_bf16_available
from accelerate._availability import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
from accelerate._availability import is_lomo_available as is_lomo_available
from accelerate._availability import is_megatron_lm_available as is_megatron_lm_available
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._checkpointing import load_accelerator_state as load_accelerator_state
from accelerate._checkpointing import load_custom_state as load_custom_state
from accelerate._checkpointing import save_accelerator_state as save_accelerator_state
from accelerate._checkpointing import save_custom_state as save_custom_state
from accelerate._constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
from accelerate._deepspeed import compile_regions_deepspeed as compile_regions_deepspeed
from accelerate._environment import parse_choice_from_env as parse_choice_from_env
from accelerate._fsdp import compile_regions_fsdp2 as compile_regions_fsdp2
from accelerate._fsdp import ensure_weights_retied as ensure_weights_retied
from accelerate._fsdp import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate._fsdp import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate._fsdp import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate._fsdp import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accelerate._fsdp import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate._fsdp import load_fsdp_model as load_fsdp_model
from accelerate._fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate._fsdp import save_fsdp_model as save_fsdp_model
from accelerate._fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from accelerate._kernel import check_os_kernel as check_os_kernel
from accelerate._models import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accelerate._names import get_pretty_name as get_pretty_name
from accelerate._precision import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from accelerate._sharded_models import get_model_tp_size as get_model_tp_size
from accelerate._sharded_models import model_has_dtensor as model_has_dtensor

_LATER = {
    "accel_deepspeed": [  # an engine that may not be installed
        "DeepSpeedEngineWrapper",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedPlugin",
        "DeepSpeedSchedulerWrapper",
        "DummyOptim",
        "DummyScheduler",
        "map_pytorch_optim_to_deepspeed",
    ],
    "accel_megatron.plugin": [  # the same
        "MegatronLMPlugin",
    ],
    "accelerate._trackers": [  # imports every tracker
        "LOGGER_TYPE_TO_CLASS",
    ],
}
if not is_deepspeed_available():
    _LATER["accel_deepspeed"] = ["DeepSpeedPlugin"]  # in Accelerate, too, the others are there with DeepSpeed only
_rebinding.write_through(__name__, _LATER)
