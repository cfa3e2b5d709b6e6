"""What the engine of Megatron-LM adds to Accelerate's surface: here by name, until it is built.

Libraries import these names whether or not they use the engine. Each keeps its signature and raises
`EngineUnavailableError` when it is called.
"""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from accel_core.errors import EngineUnavailableError
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler


def _unbuilt(engine: str, name: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"{name} belongs to the {engine} engine, which accel does not have yet; got a call. "
        "Train with one process or with data parallelism, or use Accelerate itself."
    )


def avg_losses_across_data_parallel_group(losses: object) -> NoReturn:
    """Average losses over ranks with different data."""
    raise _unbuilt("Megatron-LM", "avg_losses_across_data_parallel_group")


def finish_mpu_init() -> None:
    """Set Megatron-LM's process groups up."""
    raise _unbuilt("Megatron-LM", "finish_mpu_init")


def gather_across_data_parallel_groups(tensor: object) -> NoReturn:
    """Gather a tensor over ranks with different data."""
    raise _unbuilt("Megatron-LM", "gather_across_data_parallel_groups")


def initialize(accelerator: object, extra_args_provider: object = None, args_defaults: object = None) -> None:
    """Start Megatron-LM."""
    raise _unbuilt("Megatron-LM", "initialize")


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> NoReturn:
    """Build the part of a model that this stage holds."""
    raise _unbuilt("Megatron-LM", "model_provider_func")


def prepare_data_loader(accelerator: object, dataloader: object) -> NoReturn:
    """Share a loader out over ranks with different data."""
    raise _unbuilt("Megatron-LM", "prepare_data_loader")


def prepare_model_optimizer_scheduler(accelerator: object) -> NoReturn:
    """Build model, optimizer and schedule."""
    raise _unbuilt("Megatron-LM", "prepare_model_optimizer_scheduler")


def prepare_optimizer(accelerator: object, model: object) -> NoReturn:
    """Build the optimizer."""
    raise _unbuilt("Megatron-LM", "prepare_optimizer")


def prepare_scheduler(accelerator: object, optimizer: object, scheduler: object) -> NoReturn:
    """Build the schedule."""
    raise _unbuilt("Megatron-LM", "prepare_scheduler")


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Stands for the optimizer inside Megatron-LM."""

    def __init__(self, optimizer: object) -> None:
        raise _unbuilt("Megatron-LM", "MegatronLMOptimizerWrapper")

    def step(self) -> None:  # type: ignore[override]
        """Let the engine step."""
        raise _unbuilt("Megatron-LM", "MegatronLMOptimizerWrapper.step")


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Stands for the schedule inside Megatron-LM."""

    def __init__(self, scheduler: object, optimizers: object) -> None:
        raise _unbuilt("Megatron-LM", "MegatronLMSchedulerWrapper")


class MegatronLMDummyDataLoader:
    """Stands for a loader over Megatron-LM's own datasets."""

    def __init__(self, **dataset_kwargs: object) -> None:
        raise _unbuilt("Megatron-LM", "MegatronLMDummyDataLoader")

    def build_train_valid_test_data_iterators(self, accelerator: object) -> NoReturn:
        """Build the three iterators."""
        raise _unbuilt("Megatron-LM", "MegatronLMDummyDataLoader.build_train_valid_test_data_iterators")

    def get_train_valid_test_datasets_provider(self, accelerator: object) -> NoReturn:
        """Return what builds the three datasets."""
        raise _unbuilt("Megatron-LM", "MegatronLMDummyDataLoader.get_train_valid_test_datasets_provider")

    def set_megatron_data_args(self) -> None:
        """Describe the datasets to Megatron-LM."""
        raise _unbuilt("Megatron-LM", "MegatronLMDummyDataLoader.set_megatron_data_args")


class AbstractTrainStep:
    """One training step of Megatron-LM."""

    def __init__(self, name: str) -> None:
        raise _unbuilt("Megatron-LM", "AbstractTrainStep")

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> NoReturn:
        """Return what reads a batch."""
        raise _unbuilt("Megatron-LM", "AbstractTrainStep.get_batch_func")

    def get_forward_step_func(self) -> NoReturn:
        """Return what runs the forward pass."""
        raise _unbuilt("Megatron-LM", "AbstractTrainStep.get_forward_step_func")

    def get_loss_func(self, accelerator: object) -> NoReturn:
        """Return what computes the loss."""
        raise _unbuilt("Megatron-LM", "AbstractTrainStep.get_loss_func")


class BertTrainStep(AbstractTrainStep):
    """The training step of a BERT."""

    def __init__(self, accelerator: object, args: object) -> None:
        raise _unbuilt("Megatron-LM", "BertTrainStep")

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> NoReturn:
        """Return what reads a batch."""
        raise _unbuilt("Megatron-LM", "BertTrainStep.get_batch_func")

    def get_loss_func(self, accelerator: object, pretraining_flag: bool, num_labels: int) -> NoReturn:  # type: ignore[override]
        """Return what computes the loss."""
        raise _unbuilt("Megatron-LM", "BertTrainStep.get_loss_func")

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> NoReturn:  # type: ignore[override]
        """Return what runs the forward pass."""
        raise _unbuilt("Megatron-LM", "BertTrainStep.get_forward_step_func")


class GPTTrainStep(AbstractTrainStep):
    """The training step of a GPT."""

    def __init__(self, accelerator: object, args: object) -> None:
        raise _unbuilt("Megatron-LM", "GPTTrainStep")


class T5TrainStep(AbstractTrainStep):
    """The training step of a T5."""

    def __init__(self, accelerator: object, args: object) -> None:
        raise _unbuilt("Megatron-LM", "T5TrainStep")

    @staticmethod
    def attn_mask_postprocess(attention_mask: object) -> NoReturn:
        """Build a mask."""
        raise _unbuilt("Megatron-LM", "T5TrainStep.attn_mask_postprocess")

    @staticmethod
    def get_decoder_mask(seq_length: int, device: object) -> NoReturn:
        """Build a mask."""
        raise _unbuilt("Megatron-LM", "T5TrainStep.get_decoder_mask")

    @staticmethod
    def get_enc_dec_mask(attention_mask: object, dec_seq_length: int, device: object) -> NoReturn:
        """Build a mask."""
        raise _unbuilt("Megatron-LM", "T5TrainStep.get_enc_dec_mask")


class MegatronEngine(nn.Module):
    """A model, its optimizer and its schedule inside Megatron-LM."""

    def __init__(self, accelerator: object, model: object, optimizer: object, scheduler: object) -> None:
        raise _unbuilt("Megatron-LM", "MegatronEngine")

    def train_step(self, **batch_data: object) -> NoReturn:
        """Run a training step."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.train_step")

    def eval_step(self, **batch_data: object) -> NoReturn:
        """Run an evaluation step."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.eval_step")

    def forward(self, **batch_data: object) -> NoReturn:
        """Run a step of the mode that is on."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.forward")

    def get_batch_data_iterator(self, batch_data: object) -> NoReturn:
        """Cut a batch into parts."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.get_batch_data_iterator")

    def get_module_config(self) -> NoReturn:
        """Describe the model to Megatron-LM's data parallelism."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.get_module_config")

    def load_checkpoint(self, input_dir: object) -> None:
        """Load a checkpoint."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.load_checkpoint")

    def save_checkpoint(self, output_dir: object) -> None:
        """Save a checkpoint."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.save_checkpoint")

    def log_eval_results(self) -> None:
        """Log the results of an evaluation."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.log_eval_results")

    def eval(self) -> NoReturn:
        """Switch to evaluation."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.eval")

    def train(self) -> NoReturn:  # type: ignore[override]
        """Switch to training."""
        raise _unbuilt("Megatron-LM", "MegatronEngine.train")
