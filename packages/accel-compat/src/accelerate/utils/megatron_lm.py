"""The names of `accelerate.utils.megatron_lm` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate import _rebinding
from accelerate._availability import is_megatron_lm_available as is_megatron_lm_available

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
