"""The names of `accelerate.utils.megatron_lm` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.tree import recursively_apply as recursively_apply
from accel_core.optim.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_core.plugins.megatron import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accelerate import _rebinding
from accelerate._availability import is_megatron_lm_available as is_megatron_lm_available
from accelerate._engines import AbstractTrainStep as AbstractTrainStep
from accelerate._engines import BertTrainStep as BertTrainStep
from accelerate._engines import GPTTrainStep as GPTTrainStep
from accelerate._engines import MegatronEngine as MegatronEngine
from accelerate._engines import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accelerate._engines import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accelerate._engines import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accelerate._engines import T5TrainStep as T5TrainStep
from accelerate._engines import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from accelerate._engines import finish_mpu_init as finish_mpu_init
from accelerate._engines import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from accelerate._engines import initialize as initialize
from accelerate._engines import model_provider_func as model_provider_func
from accelerate._engines import prepare_data_loader as prepare_data_loader
from accelerate._engines import prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler
from accelerate._engines import prepare_optimizer as prepare_optimizer
from accelerate._engines import prepare_scheduler as prepare_scheduler

_rebinding.write_through(__name__)
