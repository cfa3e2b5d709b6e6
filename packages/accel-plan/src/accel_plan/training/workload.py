"""What a training step does: its batch, its number format, its optimizer and its loss."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_plan._torch import tree_leaves

Loss = Callable[[Any, Any], torch.Tensor]
"""Computes a loss from a model's output and the batch that produced it."""


@record(frozen=True)
class TrainingWorkload:
    """A training step."""

    batch: int = 1  # samples of one forward pass, over all ranks
    accumulation: int = 1  # passes of a step, whose gradients add up
    sequence: int | None = None  # tokens of a sample, for models that read token numbers
    sample: tuple[int, ...] | None = None  # shape of a sample of numbers, for other models
    precision: str = "no"  # mixed precision: "no", "bf16" or "fp16"
    # The dtype that floating point weights and numbers are converted to; by default the model's own.
    dtype: torch.dtype | None = None
    optimizer: str = "AdamW"  # a class of `torch.optim`, by name
    optimizer_arguments: Mapping[str, Any] = field(default_factory=dict)  # its arguments
    loss: Loss | None = None  # computes the loss; by default the model's own, or the mean of what it returns
    chunk_logits: bool = False  # whether the loss is computed from logits of some tokens at a time
    # How tensor parallel splits the model; "auto" for the model's own plan.
    tensor_plan: Mapping[str, str] | str = "auto"
    reduce_bucket: int = 500_000_000  # elements of the bucket in which DeepSpeed reduces gradients; its own default
    schedule: str = "1f1b"  # of pipelines, by the names of `PipelineKwargs`, as the next two
    microbatches: int | None = None  # into how many each rank's batch is divided; by default two for each rank of pp
    split: Sequence[str] | None = None  # the blocks with which stages begin, but the first; by default by bytes

    def __post_init__(self) -> None:
        """Refuse what no step can have."""
        sequence = (self.sequence or 0) if self.sample is None else int(self.sequence is None)
        if min(self.batch, self.accumulation, self.reduce_bucket, sequence, *(self.sample or ())) < 1:
            raise ConfigurationError(
                "Sizes of a batch are 1 or more, and a model reads token numbers (sequence) or numbers of a shape "
                f"(sample); got batch={self.batch}, accumulation={self.accumulation}, sequence={self.sequence}, "
                f"sample={self.sample} and reduce_bucket={self.reduce_bucket}. Give one of the two, and no 0."
            )

    def inputs(self, batch: int, sequence: int | None, dtype: torch.dtype | None) -> torch.Tensor:
        """Make a batch."""
        if sequence is not None:
            return torch.zeros((batch, sequence), dtype=torch.long)
        return torch.zeros((batch, *(self.sample or ())), dtype=dtype)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of a model's parameters that train."""
        cls, arguments = optimizer_named(self.optimizer), dict(self.optimizer_arguments)
        if "foreach" in inspect.signature(cls).parameters:
            arguments = {"foreach": True, **arguments}  # torch's default on accelerators
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            return cls(trained, **arguments)
        except (TypeError, ValueError) as failure:
            raise ConfigurationError(
                f"The optimizer does not take these arguments; got {arguments} for {cls.__name__}: {failure} Change "
                "them."
            ) from failure

    def loss_of(self, output: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of a model's output."""
        if self.loss is not None:
            return self.loss(output, inputs)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                return leaf.float().mean()  # any number that all outputs go into
        raise ConfigurationError(
            f"A loss is computed from the numbers that a model returns; got a {type(output).__name__} without any. "
            "Name a function of the output and the batch with --loss MODULE:NAME."
        )


def call_of(model: nn.Module, inputs: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a training loop's call: a model of transformers computes its loss, and keeps no cache."""
    config = getattr(model, "config", None)
    if config is None or inputs.is_floating_point():
        return (inputs,), {}
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return (), {"input_ids": inputs, "labels": inputs}


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of `torch.optim` by its name, in capitals or not."""
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise ConfigurationError(
            f"torch.optim has no such optimizer; got {name!r}. Use one of "
            f"{', '.join(sorted(cls.__name__ for cls in known.values()))}."
        )
    return known[name.lower()]


def optimizer_written(text: str) -> tuple[str, dict[str, Any]]:
    """Read an optimizer as it is written on a command line: `sgd`, or `sgd:momentum=0.9,nesterov=True`."""
    name, _, written = text.partition(":")
    arguments: dict[str, Any] = {}
    for part in filter(None, written.split(",")):
        key, _, value = part.partition("=")
        try:
            arguments[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError) as failure:
            raise ConfigurationError(
                f"An optimizer's arguments are written as NAME=VALUE, separated by commas; got {part!r}. Write for "
                "example sgd:momentum=0.9."
            ) from failure
    return optimizer_named(name).__name__, arguments
