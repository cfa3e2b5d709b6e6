"""What `accel plan` does."""

import argparse
import importlib
import re
import sys

from torch import nn

from accel_bigmodel.checkpoint.skeleton import Layer, Part, skeleton_of
from accel_bigmodel.device_map.headroom import Workload
from accel_bigmodel.device_map.result import Plan, plan_device_map
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.output import write_output
from accel_bigmodel.sizes import number_or_text
from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.modules.sizes import written_size
from accel_core.options.engines import load

__all__ = ["headroom_of", "max_memory_of", "model_of", "plan_checkpoint", "run", "train"]

_PLACING = ("max_memory", "headroom", "model", "balanced", "whole", "expert_cache")
"""Options that place a checkpoint."""

_TRAINING = (
    "layout", "fits", "ranks", "batch", "accumulation", "sequence", "sample", "optimizer", "mixed_precision",
    "checkpointing", "loss", "tp_plan", "reduce_bucket", "zero3", "device", "schedule", "microbatches", "split",
    "timeline", "explain",
)  # fmt: skip
"""Options of the memory of training."""


def max_memory_of(text: str | None) -> dict[int | str, int | str] | None:
    """Read limits as they are written on a command line."""
    if text is None:
        return None
    limits: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not device or not size:
            raise ConfigurationError(
                f"Limits are written as DEVICE=SIZE, separated by commas; got {part!r:.80}. Write for example "
                "0=24GiB,cpu=64GiB."
            )
        limits[number_or_text(device)] = number_or_text(size)
    return limits


def headroom_of(text: str | None) -> int | float | str | Workload | None:
    """Read headroom as it is written on a command line."""
    if text is None:
        return None
    workload = re.fullmatch(r"\s*(\d{1,18})\s*[x×]\s*(\d{1,18})\s*", text)
    if workload is not None:
        return Workload(int(workload[1]), int(workload[2]))
    if "." in text and text.replace(".", "", 1).isdecimal():
        return float(text)
    return number_or_text(text)


def model_of(name: str) -> nn.Module:
    """Make the model that a command line names, without weights."""
    if "" not in sys.path:  # a command begins in the folder of its own program
        sys.path.insert(0, "")
    try:
        make = load(name)
        with init_empty_weights():
            made: object = make()
    except (ImportError, AttributeError, TypeError, ValueError) as failure:
        raise ConfigurationError(
            f"The model that --model names cannot be created; got {name!r}: {failure}. Write MODULE:NAME of a class or "
            "function that takes no arguments."
        ) from failure
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"What --model names does not create a model; got a {type(made).__name__} from {name!r}. Name a class of "
            "modules, or a function that returns one."
        )
    return made


def plan_checkpoint(
    source: str,
    max_memory: str | None = None,
    headroom: str | None = None,
    dtype: str | None = None,
    balanced: bool = False,
    no_split: list[str] | None = None,
    model: nn.Module | None = None,
    expert_cache: str | None = None,
) -> Plan:
    """Plan a checkpoint from its configuration or its headers."""
    model = skeleton_of(source) if model is None else model
    classes = list(no_split or getattr(model, "_no_split_modules", None) or ())
    kept = headroom_of(headroom)
    if isinstance(model, Part):
        classes += {Layer.__name__} & {type(module).__name__ for module in model.modules()}
        if isinstance(kept, Workload):
            raise ConfigurationError(
                "Headroom for a batch of sequences needs the model, because headers do not describe its forward; got "
                f"no config.json for {source!r} whose model transformers has. Give the headroom as a size or a "
                "fraction, or name the model with --model."
            )
    return plan_device_map(
        model,
        max_memory_of(max_memory),
        headroom=kept,
        no_split_module_classes=classes,
        dtype=dtype,
        balanced=balanced,
        expert_cache=None if expert_cache is None else number_or_text(expert_cache),
    )


_BY_NAME = """The files do not say in which order the model runs its parts, so the plan goes by name. To load as
planned, write the plan with --json and pass `device_map=Plan.from_json(text).device_map`; to plan as
"auto" would, name the model with --model, or install transformers where a config.json names it."""


def _refuse_others(args: argparse.Namespace) -> None:
    """Refuse options of placing beside --train, and those of training without it: they would change nothing."""
    others = [f"--{name.replace('_', '-')}" for name in (_PLACING if args.train else _TRAINING) if getattr(args, name)]
    if others:
        raise ConfigurationError(
            f"--train finds the memory of training, and other options place a checkpoint; got {', '.join(others)} "
            f"{'beside' if args.train else 'without'} --train. Leave {'it' if len(others) == 1 else 'them'} out, or "
            f"{'leave --train out' if args.train else 'add --train'}."
        )


def train(args: argparse.Namespace) -> int:
    """Carry `accel plan-training` out."""
    if not has_module("accel_parallel"):
        raise MissingDependencyError(
            "Predicting the memory of training needs accel-parallel, which is not installed. Run `pip install "
            "accel-parallel`."
        )
    training = importlib.import_module("accel_bigmodel.training.command")  # it loads FSDP, which placing needs not
    return int(training.run(args))


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan` out."""
    _refuse_others(args)
    if args.train:
        return train(args)
    model = skeleton_of(args.checkpoint) if args.model is None else model_of(args.model)
    plan = plan_checkpoint(
        args.checkpoint, args.max_memory, args.headroom, args.dtype, args.balanced, args.whole, model, args.expert_cache
    )
    lines = [f"{args.checkpoint}: {written_size(plan.nbytes)} of weights", "", plan.table(), ""]
    lines += [plan.explain(share.device) for share in plan.shares if share.weights]
    if plan.experts is not None:
        lines += ["", plan.experts.explain()]
    if isinstance(model, Part):
        lines += ["", _BY_NAME]
    sys.stdout.write("\n".join(lines) + "\n")
    write_output(args.svg, plan.svg)
    write_output(args.json, plan.to_json)
    return 0
