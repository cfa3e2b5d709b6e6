"""`accel plan`: what it was asked for, looked at before torch is imported, which takes seconds."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.mesh.spec import parse_layouts
from accel_core.options.engines import load
from accel_plan.output import is_count

__all__ = ["run"]

_NUMBERS = ("batch", "accumulation", "sequence", "ranks", "reduce_bucket", "microbatches")
_PLACING = ("max_memory", "headroom", "model", "balanced", "whole", "expert_cache")
"""Options that place a checkpoint."""

_TRAINING = (
    "layout", "fits", "ranks", "batch", "accumulation", "sequence", "sample", "optimizer", "mixed_precision",
    "checkpointing", "loss", "chunk_logits", "tp_plan", "reduce_bucket", "schedule", "microbatches", "split",
)  # fmt: skip
"""Options of the memory of training."""


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan` out.

    Raises:
        ConfigurationError: An option is not valid.
        MissingDependencyError: The memory of training is asked for without accel-parallel.
    """
    _refuse_others(args)
    return train(args) if args.train else _carried_out("accel_plan.checkpoint:run", args)


def train(args: argparse.Namespace) -> int:
    """Carry `accel plan-training` out; it raises what `run` does."""
    _read(args)
    return _carried_out("accel_plan.training.command:run", args)


def _carried_out(home: str, args: argparse.Namespace) -> int:
    if args.checkpoint.endswith(".py"):
        raise ConfigurationError(
            f"A Python file is not a checkpoint; got {args.checkpoint!r}. Name a class or function of it that makes a "
            f"model, as seen from the working folder: accel plan-training {Path(args.checkpoint).stem}:NAME."
        )
    return int(load(home)(args))


def _read(args: argparse.Namespace) -> None:
    """Replace what is written on the command line of plan-training by what it means."""
    if not has_module("accel_parallel"):
        raise MissingDependencyError(
            "Predicting the memory of training needs accel-parallel, which is not installed. Run `pip install "
            "accel-parallel`."
        )
    for name in _NUMBERS:
        vars(args)[name] = _whole_number(vars(args)[name], f"--{name.replace('_', '-')}")
    args.sample, args.tp_plan = _shape(args.sample), _tensor_plan(args.tp_plan)
    if (args.sequence is None) == (args.sample is None):
        raise ConfigurationError(
            f"A model reads token numbers or samples of a shape; got --sequence {args.sequence} and --sample "
            f"{args.sample}. Give one of the two: --sequence 1024 for tokens, --sample 3x224x224 for numbers."
        )
    parse_layouts(args.layout or "single")


def _refuse_others(args: argparse.Namespace) -> None:
    """Refuse options that place weights with --train, and those of training without it: they would have no effect."""
    others = [f"--{name.replace('_', '-')}" for name in (_PLACING if args.train else _TRAINING) if vars(args)[name]]
    if others:
        raise ConfigurationError(
            f"--train finds the memory of training, and other options place a checkpoint; got {', '.join(others)} "
            f"{'beside' if args.train else 'without'} --train. Leave {'it' if len(others) == 1 else 'them'} out, or "
            f"{'leave --train out' if args.train else 'add --train'}."
        )


def _whole_number(text: str | None, option: str) -> int | None:
    if text is None or is_count(text):
        return None if text is None else int(text)
    raise ConfigurationError(f"{option} takes a whole number; got {text!r:.80}. Write for example {option} 8.")


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(map(is_count, parts)):
        raise ConfigurationError(
            f"The shape of a sample is written as sizes joined by x; got {text!r:.80}. Write for example --sample "
            "3x224x224."
        )
    return tuple(map(int, parts))


def _tensor_plan(text: str | None) -> Mapping[str, str] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(
            f"A plan of tensor parallel is JSON that maps patterns of module names to styles; got {text!r:.80}. Write "
            """for example --tp-plan '{"layers.*.up": "colwise"}'."""
        )
    return found
