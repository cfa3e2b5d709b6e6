"""What `accel plan` does."""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from accel_bigmodel.checkpoint.skeleton import Layer, Part, skeleton_of
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.sizes import number_or_text
from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import written_size
from accel_core.options.engines import load
from accel_plan.device_map import Plan, plan_device_map
from accel_plan.headroom import Workload
from accel_plan.output import write_output

__all__ = ["headroom_of", "max_memory_of", "model_of", "named", "plan_checkpoint", "run"]


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


def named(name: str, what: str) -> Callable[..., Any]:
    """Return the class or function of a name."""
    if "" not in sys.path:  # a command begins in the folder of its own program
        sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = load(name)
    except (ImportError, AttributeError, ValueError) as failure:
        raise ConfigurationError(
            f"The name of {what} cannot be imported; got {name!r}: {str(failure).rstrip('.')}. Write MODULE:NAME, as "
            "seen from the working folder."
        ) from failure
    if isinstance(found, nn.Module) or not callable(found):
        raise ConfigurationError(
            f"The name of {what} is that of a class or a function; got a {type(found).__name__} of {name!r}. Name a "
            "function that returns it."
        )
    return found


def model_of(name: str) -> nn.Module:
    """Make the model that a command line names, without weights."""
    make = named(name, "the model")
    try:
        with init_empty_weights():
            made: object = make()
    except (TypeError, ValueError) as failure:
        raise ConfigurationError(
            f"The model cannot be made; got {name!r}: {str(failure).rstrip('.')}. Name a class or function that takes "
            "no arguments."
        ) from failure
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"A model is made by a class of modules, or a function that returns one; got a {type(made).__name__} of "
            f"{name!r}. Name another."
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


def run(args: argparse.Namespace) -> int:
    """Place a checkpoint."""
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
