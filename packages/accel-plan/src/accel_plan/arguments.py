"""`accel plan`: what it was asked for, looked at before torch is imported, which takes seconds."""

import argparse
from pathlib import Path

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.mesh.spec import parse_layouts
from accel_core.options.engines import load

_OPTIONS = ("max_memory", "headroom", "model", "expert_cache", "balanced", "whole", "dtype", "svg", "json")
"""Options of `accel plan`, of which none may stand before --train."""


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan` out.

    Raises:
        ConfigurationError: An option is not valid.
        MissingDependencyError: The memory of training is asked for without accel-parallel.
    """
    if args.train is not None:
        before = [f"--{name.replace('_', '-')}" for name in _OPTIONS if vars(args)[name]]
        if before:
            raise ConfigurationError(
                f"Before --train there are no options; got {', '.join(before)}. Write accel plan-training MODEL, and "
                "its options."
            )
        return train(args.training.parse_args([*filter(None, [args.checkpoint]), *args.train]))
    if args.checkpoint is None:
        raise ConfigurationError("A plan is made of a checkpoint; got none. Name a file or folder: accel plan FOLDER.")
    return _carried_out("accel_plan.checkpoint:run", args)


def train(args: argparse.Namespace) -> int:
    """Carry `accel plan-training` out; it raises what `run` does."""
    if not has_module("accel_parallel"):
        raise MissingDependencyError(
            "Predicting the memory of training needs accel-parallel, which is not installed. Run `pip install "
            "accel-parallel`."
        )
    parse_layouts(args.layout or "single")
    return _carried_out("accel_plan.training.command:run", args)


def _carried_out(home: str, args: argparse.Namespace) -> int:
    if args.checkpoint.endswith(".py"):
        raise ConfigurationError(
            f"A Python file is not a checkpoint; got {args.checkpoint!r}. Name a class or function of it that makes a "
            f"model, as seen from the working folder: accel plan-training {Path(args.checkpoint).stem}:NAME."
        )
    return int(load(home)(args))
