"""The names of `accelerate.utils.megatron_lm` in Accelerate, imported from where accel defines them."""

from typing import TYPE_CHECKING

from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate import _rebinding
from accelerate._availability import is_megatron_lm_available as is_megatron_lm_available

if TYPE_CHECKING:
    from accel_megatron import AbstractTrainStep as AbstractTrainStep
    from accel_megatron import BertTrainStep as BertTrainStep
    from accel_megatron import GPTTrainStep as GPTTrainStep
    from accel_megatron import MegatronEngine as MegatronEngine
    from accel_megatron import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
    from accel_megatron import MegatronLMDummyScheduler as MegatronLMDummyScheduler
    from accel_megatron import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
    from accel_megatron import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
    from accel_megatron import T5TrainStep as T5TrainStep
    from accel_megatron import (
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    )
    from accel_megatron import finish_mpu_init as finish_mpu_init
    from accel_megatron import gather_across_data_parallel_groups as gather_across_data_parallel_groups
    from accel_megatron import initialize as initialize
    from accel_megatron import model_provider_func as model_provider_func
    from accel_megatron import prepare_data_loader as prepare_data_loader
    from accel_megatron import prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler
    from accel_megatron import prepare_optimizer as prepare_optimizer
    from accel_megatron import prepare_scheduler as prepare_scheduler

_LATER = {
    "accel_megatron": [  # an engine that may not be installed
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronEngine",
        "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler",
        "MegatronLMOptimizerWrapper",
        "MegatronLMSchedulerWrapper",
        "T5TrainStep",
        "avg_losses_across_data_parallel_group",
        "finish_mpu_init",
        "gather_across_data_parallel_groups",
        "initialize",
        "model_provider_func",
        "prepare_data_loader",
        "prepare_model_optimizer_scheduler",
        "prepare_optimizer",
        "prepare_scheduler",
    ],
}
_rebinding.write_through(__name__, _LATER)
