"""Builds an engine step by step, for scripts that call these functions themselves."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from accel_core.errors import PreparationError
from accel_megatron import arguments, groups, models, optimizers
from accel_megatron.run import current


def initialize(
    accelerator: object,
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Collect the arguments of Megatron-LM and create its process groups; every rank calls it.

    Raises:
        ConfigurationError: Arguments are unknown, or contradict each other.
    """
    run = current()
    run.arguments = arguments.build(
        run.plugin, run.world.size, extra_args_provider=extra_args_provider, args_defaults=args_defaults
    )
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Create Megatron's process groups, once per process; every rank calls it.

    Raises:
        StateError: The process already has groups of other sizes.
    """
    groups.join(current())


def prepare_model_optimizer_scheduler(accelerator: object) -> tuple[list[nn.Module], Any, Any]:
    """Build this rank's part of the model, its optimizer and its schedule; every rank calls it."""
    run = current()
    chunks = models.build(run)
    optimizer = None if run.optimizer is None else prepare_optimizer(accelerator, chunks)
    schedule = None if run.schedule is None else prepare_scheduler(accelerator, optimizer, run.schedule)
    return chunks, optimizer, schedule


def prepare_optimizer(accelerator: object, model: nn.Module | Sequence[nn.Module]) -> Any:
    """Build the optimizer of a model."""
    return optimizers.build_optimizer(current(), [model] if isinstance(model, nn.Module) else model)


def prepare_scheduler(accelerator: object, optimizer: object, scheduler: object) -> Any:
    """Build the schedule of an optimizer.

    Raises:
        ConfigurationError: The schedule is of another class.
        PreparationError: There is no optimizer.
    """
    optimizers.refuse_schedule(scheduler)
    if optimizer is None:
        raise PreparationError("A schedule needs its optimizer; got none. Pass the optimizer to prepare() too.")
    return optimizers.build_schedule(current(), optimizer)
