"""Megatron: megatron-core's models, parallelism, optimizer and checkpoints behind `prepare` and `model(**batch)`.

Importing this package loads nothing; a name brings its module, and torch, when it is first used.
"""

from accel_core._lazy import attach
from accel_megatron._version import __version__

_NAMES = {
    "accel_megatron.loss_reduce": ["avg_losses_across_data_parallel_group", "gather_across_data_parallel_groups"],
    "accel_megatron.engine": ["MegatronEngine"],
    "accel_megatron.loaders": ["MegatronLMDummyDataLoader", "prepare_data_loader"],
    "accel_megatron.build": [
        "finish_mpu_init",
        "initialize",
        "prepare_model_optimizer_scheduler",
        "prepare_optimizer",
        "prepare_scheduler",
    ],
    "accel_megatron.model_configs": ["add_model_config_to_megatron_parser"],
    "accel_megatron.models": ["model_provider_func"],
    "accel_megatron.plugin": ["MegatronLMDummyScheduler", "MegatronLMPlugin"],
    "accel_megatron.steps": ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "T5TrainStep"],
    "accel_megatron.wrappers": ["MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper"],
}

__getattr__, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
__all__ = [*_all, "__version__"]
