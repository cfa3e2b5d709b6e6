"""Translates an optimizer and logging options into Megatron-LM's arguments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accel_core.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    import torch

UNCHANGED = (
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
)
"""Fields of the plugin, besides its options, that are arguments under the same name."""

RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
"""Names of arguments that differ from those of their options."""

SCHEDULE = (
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "lr_decay_style",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
)


def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Translate an optimizer that Megatron-LM has into its arguments."""
    name = type(optimizer).__name__.lower()
    first = optimizer.param_groups[0]
    shared = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
    if "adam" in name:
        first_beta, second_beta = first["betas"]
        return {
            "optimizer": "adam",
            "adam_beta1": first_beta,
            "adam_beta2": second_beta,
            "adam_eps": first["eps"],
            **shared,
        }
    if "sgd" in name:
        return {"optimizer": "sgd", "sgd_momentum": first["momentum"], **shared}
    raise ConfigurationError(
        f"Megatron-LM does not have this optimizer; got {type(optimizer).__name__}. Use an Adam or SGD."
    )


def of_logging() -> dict[str, Any]:
    """Return the arguments that switch on everything that Megatron-LM can log."""
    try:
        parsing = importlib.import_module("megatron.training.arguments")
    except ImportError:
        raise MissingDependencyError(
            "The logging options are defined by Megatron-LM, which is not installed. Install it from its repository, "
            "or set set_all_logging_options=False."
        ) from None
    known = vars(parsing._add_logging_args(_Collector()))["flags"]
    on = {flag: True for flag in known if flag.startswith("log_")}
    return on | {flag.removeprefix("no_"): True for flag in known if flag.startswith("no_log_")}


class _Collector:
    """An argument parser that only collects the names of flags."""

    def __init__(self) -> None:
        self.flags: list[str] = []

    def add_argument_group(self, *_args: object, **_kwargs: object) -> _Collector:
        return self

    def add_argument(self, flag: str, *_others: str, **_kwargs: object) -> None:
        self.flags.append(flag.lstrip("-").replace("-", "_"))
