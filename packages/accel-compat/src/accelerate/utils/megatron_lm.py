"""The names of `accelerate.utils.megatron_lm` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import (
    send_to_device,
)
from accel_core.comm.tree import (
    recursively_apply,
)
from accel_core.optim.optimizer import (
    AcceleratedOptimizer,
)
from accel_core.optim.scheduler import (
    AcceleratedScheduler,
)
from accel_core.plugins.megatron import (
    MegatronLMDummyScheduler,
)
from accelerate._availability import (
    is_megatron_lm_available,
)
from accelerate._engines import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronEngine,
    MegatronLMDummyDataLoader,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    finish_mpu_init,
    gather_across_data_parallel_groups,
    initialize,
    model_provider_func,
    prepare_data_loader,
    prepare_model_optimizer_scheduler,
    prepare_optimizer,
    prepare_scheduler,
)
from accelerate._rebinding import write_through

__all__ = [
    "AbstractTrainStep",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
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
    "is_megatron_lm_available",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
    "recursively_apply",
    "send_to_device",
]

write_through(__name__)
