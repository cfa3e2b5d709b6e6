"""What `accel plan` does."""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from accel_bigmodel.checkpoint.skeleton import Layer, Part, skeleton_of
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.sizes import number_or_text, whole_classes
from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import written_size
from accel_core.options.engines import load
from accel_plan.device_map import plan_device_map
from accel_plan.headroom import Workload
from accel_plan.output import write_output


def max_memory_of(text: str | None) -> dict[int | str, int | str] | None:
    """Read limits as they are written on a command line."""
    if text is None:
        return None
    limits: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, _, size = (piece.strip() for piece in part.partition("="))
        if not device or not size:
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
        return found
    except (ImportError, AttributeError, ValueError) as failure:
        raise ConfigurationError(
            f"The name of {what} cannot be imported; got {name!r}: {str(failure).rstrip('.')}. Write MODULE:NAME, as "
            "seen from the working folder."
        ) from failure


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


_BY_NAME = """The files do not say in which order the model runs its parts, so the plan goes by name. To load as
planned, write the plan with --json and pass `device_map=Plan.from_json(text).device_map`; to plan as
"auto" would, name the model with --model, or install transformers where a config.json names it."""


def run(args: argparse.Namespace) -> int:
    """Place a checkpoint."""
    model = skeleton_of(args.checkpoint) if args.model is None else model_of(args.model)
    classes = list(args.whole or whole_classes(model))
    headroom = headroom_of(args.headroom)
    if isinstance(model, Part):
        classes += {Layer.__name__} & {type(module).__name__ for module in model.modules()}
        if isinstance(headroom, Workload):
            raise ConfigurationError(
                "Headroom for a batch of sequences needs the model, because headers do not describe its forward; got "
                f"no config.json for {args.checkpoint!r} whose model transformers has. Give the headroom as a size or "
                "a fraction, or name the model with --model."
            )
    plan = plan_device_map(
        model,
        max_memory_of(args.max_memory),
        headroom=headroom,
        no_split_module_classes=classes,
        dtype=args.dtype,
        balanced=args.balanced,
        expert_cache=None if args.expert_cache is None else number_or_text(args.expert_cache),
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
