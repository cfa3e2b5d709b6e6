"""`accel plan`: what it was asked for, looked at before torch is imported, which takes seconds."""

import argparse
from pathlib import Path

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.mesh.spec import parse_layouts
from accel_core.options.engines import load

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan` out.

    Raises:
        ConfigurationError: An option is not valid.
        MissingDependencyError: The memory of training is asked for without accel-parallel.
    """
    others = [f"--{name.replace('_', '-')}" for name in args.others[args.train] if vars(args)[name]]
    if others:
        raise ConfigurationError(
            f"--train finds the memory of training, and other options place a checkpoint; got {', '.join(others)} "
            f"{'beside' if args.train else 'without'} --train. Leave {'it' if len(others) == 1 else 'them'} out, or "
            f"{'leave --train out' if args.train else 'add --train'}."
        )
    if args.checkpoint.endswith(".py"):
        raise ConfigurationError(
            f"A Python file is not a checkpoint; got {args.checkpoint!r}. Name a class or function of it that makes a "
            f"model, as seen from the working folder: accel plan --train {Path(args.checkpoint).stem}:NAME."
        )
    if args.train:
        _check_training(args)
    return int(load("accel_plan.training.command:run" if args.train else "accel_plan.checkpoint:run")(args))


def _check_training(args: argparse.Namespace) -> None:
    if not has_module("accel_parallel"):
        raise MissingDependencyError(
            "Predicting the memory of training needs accel-parallel, which is not installed. Run `pip install "
            "accel-parallel`."
        )
    if (args.sequence is None) == (args.sample is None):
        raise ConfigurationError(
            f"A model reads token numbers or samples of a shape; got --sequence {args.sequence} and --sample "
            f"{args.sample}. Give one of the two: --sequence 1024 for tokens, --sample 3x224x224 for numbers."
        )
    parse_layouts(args.layout or "single")
