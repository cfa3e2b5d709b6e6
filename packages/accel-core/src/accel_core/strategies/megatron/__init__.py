"""Megatron: megatron-core's models, parallelism, optimizer and checkpoints behind `prepare` and `model(**batch)`."""

from accel_core.strategies.megatron.averages import (
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from accel_core.strategies.megatron.engine import MegatronEngine
from accel_core.strategies.megatron.loaders import MegatronLMDummyDataLoader, prepare_data_loader
from accel_core.strategies.megatron.making import (
    finish_mpu_init,
    initialize,
    prepare_model_optimizer_scheduler,
    prepare_optimizer,
    prepare_scheduler,
)
from accel_core.strategies.megatron.models import model_provider_func
from accel_core.strategies.megatron.steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
from accel_core.strategies.megatron.wrappers import MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
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
]
