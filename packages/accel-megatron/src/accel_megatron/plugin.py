"""How Megatron-LM splits a model over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.options.option import options_of
from accel_megatron.model_configs import MODEL_CONFIGS_TO_MEGATRON_PARSERS
from accel_megatron.options import MegatronOptions
from accel_megatron.plugin_arguments import RENAMED, SCHEDULE, UNCHANGED, of_logging, of_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn


@record
class MegatronLMPlugin(MegatronOptions):
    """Arguments of Megatron-LM, the options of `MegatronOptions` first; one left at `None` is read from MEGATRON_LM_*.

    Args:
        pipeline_model_parallel_split_rank: First stage of the decoder, in a model with an encoder.
        num_layers_per_virtual_pipeline_stage: Layers of a virtual stage, where stages are interleaved.
        is_train_batch_min: Whether the run uses the smallest batch size of several loaders; otherwise the largest.
        train_iters: Optimizer steps of the whole run.
        train_samples: Samples of the whole run.
        weight_decay_incr_style: "constant", "linear" or "cosine": how weight decay changes.
        start_weight_decay: Weight decay at the start.
        end_weight_decay: Weight decay at the end.
        lr_decay_style: "constant", "linear" or "cosine": how the learning rate falls.
        lr_decay_iters: Steps over which it falls.
        lr_decay_samples: Samples over which it falls.
        lr_warmup_iters: Steps over which it rises.
        lr_warmup_samples: Samples over which it rises.
        lr_warmup_fraction: Share of the falling steps over which it rises, 0 to 1.
        min_lr: The lowest learning rate.
        consumed_samples: Samples already used by training, validation and test.
        no_wd_decay_cond: Called with a name and a parameter; returns whether weight decay leaves it alone.
        scale_lr_cond: Called with a name and a parameter; returns whether its learning rate is multiplied.
        lr_mult: What it is multiplied by.
        megatron_dataset_flag: Whether the data are Megatron's own datasets.
        seq_length: Length of sequences in tokens.
        encoder_seq_length: Length of the encoder's sequences in tokens.
        decoder_seq_length: Length of the decoder's sequences in tokens.
        tensorboard_dir: Folder for TensorBoard.
        set_all_logging_options: Whether everything that Megatron can log is logged.
        eval_iters: Batches of an evaluation.
        eval_interval: Steps between evaluations.
        return_logits: Whether the forward pass returns logits.
        custom_train_step_class: Class of the training step.
        custom_train_step_kwargs: Its arguments.
        custom_model_provider_function: Makes the model.
        custom_prepare_model_function: Prepares the model.
        custom_megatron_datasets_provider_function: Makes the datasets.
        custom_get_batch_function: Reads a batch.
        custom_loss_function: Computes the loss.
        other_megatron_args: Further arguments of Megatron-LM, by name.

    Attributes:
        megatron_lm_default_args: Arguments under Megatron-LM's own names, filled step by step.
        DDP_impl: "torch" where only data are split, else "local".

    Raises:
        ConfigurationError: An environment variable cannot be read.
        MissingDependencyError: `set_all_logging_options` is set, and Megatron-LM is not installed.

    Examples:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
        >>> accelerator = Accelerator(megatron_lm_plugin=plugin)  # doctest: +SKIP
    """

    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: type[Any] | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Fill what is left open from the environment, and start the arguments of Megatron-LM."""
        for option in options_of(MegatronOptions):
            if getattr(self, option.field) is None:
                setattr(self, option.field, option.read())
        split = self.tp_degree != 1 or self.pp_degree != 1 or self.use_distributed_optimizer
        self.DDP_impl = "local" if split else "torch"
        fields = [option.field for option in options_of(MegatronOptions) if option.field != "recompute_activations"]
        self.megatron_lm_default_args: dict[str, Any] = {
            "DDP_impl": self.DDP_impl,
            **{RENAMED.get(name, name): getattr(self, name) for name in (*fields, *UNCHANGED)},
        }
        if self.recompute_activations:
            self.megatron_lm_default_args["recompute_granularity"] = "selective"
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.set_all_logging_options:
            self.set_tensorboard_logging_options()
        self.megatron_lm_default_args |= self.other_megatron_args or {}  # last, because the user named these

    def set_network_size_args(self, model: nn.Module, batch_data: Mapping[str, Any] | None = None) -> None:
        """Describe a model to Megatron-LM.

        Args:
            model: A model whose `config.model_type` has a parser.
            batch_data: A batch that shows the length of sequences, or `None`.

        Raises:
            ConfigurationError: No parser is known for this kind of model.
        """
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)).lower()
        for name, parse in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items():
            if name in kind:
                parse(self, model, batch_data)
                return
        raise ConfigurationError(
            f"No parser describes this kind of model to Megatron-LM; got {kind!r}. Use one of "
            f"{sorted(MODEL_CONFIGS_TO_MEGATRON_PARSERS)}, or register one with add_model_config_to_megatron_parser."
        )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Choose the number format.

        Args:
            mixed_precision: "no", "fp16" or "bf16".
        """
        if mixed_precision == "fp16":
            self.megatron_lm_default_args["fp16"] = True
        elif mixed_precision == "bf16":
            self.megatron_lm_default_args["bf16"] = True
            self.DDP_impl = "local"
            self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Choose the batch sizes.

        Args:
            micro_batch_size: Samples of one rank in one part of a batch.
            dp_degree: Ranks that read different data.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)
        self.megatron_lm_default_args |= {
            "data_parallel_size": dp_degree,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": self.global_batch_size,
        }

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Translate an optimizer.

        Args:
            optimizer: An Adam or SGD of any library, recognized by its class name.

        Raises:
            ConfigurationError: Megatron-LM has no such optimizer.
        """
        self.megatron_lm_default_args |= of_optimizer(optimizer)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Translate a schedule.

        Args:
            scheduler: Has `total_num_steps` and `warmup_num_steps`, counted in batches of one rank.
        """
        ranks = self.megatron_lm_default_args["data_parallel_size"]
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps // ranks  # scripts count steps as one process takes them
            if self.train_samples is not None:
                warnings.warn(
                    "The schedule gives the length of the run in steps; train_samples is ignored.", stacklevel=2
                )
                self.train_samples = None
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps // ranks
            if self.lr_warmup_samples is not None:
                warnings.warn("The schedule gives the warmup in steps; lr_warmup_samples is ignored.", stacklevel=2)
            self.lr_warmup_samples = 0
        for name in ("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", *SCHEDULE):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_tensorboard_logging_options(self) -> None:
        """Switch on everything that Megatron-LM can log.

        Raises:
            MissingDependencyError: Megatron-LM is not installed.
        """
        self.megatron_lm_default_args |= of_logging()


class MegatronLMDummyScheduler:
    """Takes the place of the schedule that Megatron-LM builds."""

    def __init__(
        self, optimizer: object, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: object
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
