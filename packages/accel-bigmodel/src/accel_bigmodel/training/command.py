"""What `accel plan --train` does."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.skeleton import Part, model_of_config, skeleton_of
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.output import write_output
from accel_bigmodel.sizes import is_count, number_or_text
from accel_bigmodel.training import report
from accel_bigmodel.training.prediction import TrainingMemory, predict
from accel_bigmodel.training.search import has_blocks, smallest
from accel_bigmodel.training.sharing import check_layout
from accel_bigmodel.training.workload import Loss, TrainingWorkload, optimizer_written
from accel_core.errors import ConfigurationError
from accel_core.mesh.spec import parse_layouts
from accel_core.modules.sizes import as_dtype, convert_file_size_to_int, written_size
from accel_core.options.engines import load

__all__ = ["maker_of", "run", "workload_of"]


def maker_of(name: str) -> Callable[[], nn.Module]:
    """Return what makes the model that a command line names, with parameters on the meta device."""
    if not os.path.exists(name) and ":" in name:
        make = _named(name, "the model")

        def made() -> nn.Module:
            with init_empty_weights():
                model: object = make()
            if not isinstance(model, nn.Module):
                raise ConfigurationError(
                    f"A model is made of a class of modules, or a function that returns one; got a "
                    f"{type(model).__name__} of {name!r}. Name another."
                )
            return model

        return made
    model = skeleton_of(name) if os.path.exists(name) else model_of_config(name)
    if isinstance(model, Part):
        raise ConfigurationError(
            "A training step runs the model's forward, which headers do not describe; got no config.json for "
            f"{name!r} whose model transformers has. Name the model as MODULE:NAME."
        )
    # Made anew at each call: a model that was split or sharded for one layout cannot be for another.
    return lambda: skeleton_of(name) if os.path.exists(name) else model_of_config(name)


def _named(name: str, what: str) -> Callable[..., Any]:
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


def _pairs(text: str) -> dict[str, int]:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(is_count(number) for _, _, number in pairs):
        raise ConfigurationError(
            f"Options of stage 3 are written as NAME=NUMBER, separated by commas; got {text!r:.80}. Write for example "
            "--zero3 stage3_max_reuse_distance=0."
        )
    return {name: int(number) for name, _, number in pairs}


def _tensor_plan(text: str | None) -> Mapping[str, str] | str:
    if text is None:
        return "auto"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise ConfigurationError(
            f"A plan of tensor parallel is written as JSON; got {text!r:.80}: {failure}. Write for example "
            """--tp-plan '{"layers.*.up": "colwise"}'."""
        ) from failure
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(
            f"A plan of tensor parallel maps patterns of module names to styles; got {text!r:.80}. Write for example "
            """--tp-plan '{"layers.*.up": "colwise"}'."""
        )
    return found


def workload_of(args: argparse.Namespace) -> TrainingWorkload:
    """Return the training step that a command line describes."""
    optimizer, arguments = optimizer_written(args.optimizer or "adamw")
    loss: Loss | None = None if args.loss is None else _named(args.loss, "the loss")
    dtype = as_dtype(args.dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"Weights are trained in a floating point dtype; got --dtype {args.dtype}. Use float32, bfloat16 or "
            "float16."
        )
    options = None if args.zero3 is None else _pairs(args.zero3)
    bucket = _whole_number(args.reduce_bucket, "--reduce-bucket")
    return TrainingWorkload(
        batch=_whole_number(args.batch or "1", "--batch") or 0,
        accumulation=_whole_number(args.accumulation or "1", "--accumulation") or 0,
        sequence=_whole_number(args.sequence, "--sequence"),
        sample=_shape(args.sample),
        precision=args.mixed_precision or "no",
        dtype=dtype,
        optimizer=optimizer,
        optimizer_arguments=arguments,
        foreach=args.device != "cpu",
        loss=loss,
        chunk_logits=args.chunk_logits,
        tensor_plan=_tensor_plan(args.tp_plan),
        reduce_bucket=TrainingWorkload.reduce_bucket if bucket is None else bucket,
        zero3=options or {},
        microbatches=_whole_number(args.microbatches, "--microbatches"),
        split=None if args.split is None else args.split.split(","),
    )


def _compared(
    args: argparse.Namespace, make: Callable[[], nn.Module], workload: TrainingWorkload, ways: list[bool]
) -> list[TrainingMemory]:
    """Find the memory on each layout that was named; of pipelines, under each schedule."""
    specs = parse_layouts(args.layout or "single")
    for option in ("schedule", "microbatches", "split", "timeline", "explain"):
        if getattr(args, option) and not any(spec.size("pp") > 1 for spec in specs):
            raise ConfigurationError(
                f"Only pipelines have a schedule; got --{option} and --layout {args.layout}. Name a layout with pp, or "
                "leave it out."
            )
    schedules = (args.schedule or workload.schedule).split(",")
    tasks = [
        (spec, replace(workload, schedule=each))
        for spec in specs
        for each in (schedules if spec.size("pp") > 1 else schedules[:1])
    ]
    for spec, own in tasks:
        check_layout(spec, own)
    return [predict(make, spec, own, checkpointing=way) for spec, own in tasks for way in ways]


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan --train` out.

    Raises:
        ConfigurationError: An option is not valid, or no layout of those tried fits.
    """
    limit = None if args.fits is None else convert_file_size_to_int(number_or_text(args.fits))
    workload, make = workload_of(args), maker_of(args.checkpoint)
    ranks = _whole_number(args.ranks or "8", "--ranks") or 1
    way = None if args.checkpointing is None else args.checkpointing == "yes"
    rows: list[TrainingMemory] = []
    chosen: TrainingMemory | None = None
    if limit is not None and args.layout is None:
        chosen = smallest(make, workload, limit, ranks=ranks, checkpointing=way, report=rows.append)
    else:
        ways = [way] if way is not None else [False, True] if has_blocks(make()) else [False]
        rows = _compared(args, make, workload, ways)
        if limit is not None:
            fitting = [row for row in rows if row.peak <= limit]
            chosen = min(fitting, key=lambda row: row.ranks, default=None)
    _show(args, rows, limit, chosen, workload)
    return 1 if limit is not None and chosen is None else 0


def _show(
    args: argparse.Namespace,
    rows: list[TrainingMemory],
    limit: int | None,
    chosen: TrainingMemory | None,
    workload: TrainingWorkload,
) -> None:
    sample = f"sequences of {workload.sequence}" if workload.sequence else f"samples of {args.sample}"
    title = f"{args.checkpoint}: a batch of {workload.batch} {sample}, {workload.optimizer}, mixed precision " + (
        workload.precision
    )
    lines = [f"{title}. Bytes of each rank at the peak:", "", report.table(rows, limit)]
    if limit is not None:
        verdict = "No layout of these fits" if chosen is None else f"The smallest layout that fits is {_words(chosen)}"
        lines += ["", f"{verdict} in {written_size(limit)}."]
    for text in (report.pipelines(rows), report.explained(rows) if args.explain else ""):
        lines += ["", text] if text else []
    sys.stdout.write("\n".join(lines) + "\n")
    write_output(args.svg, partial(report.svg, title, rows, limit))
    write_output(args.timeline, partial(report.timelines, rows))
    write_output(args.json, partial(report.to_json, rows, limit, chosen))


def _words(chosen: TrainingMemory) -> str:
    count = f"{chosen.ranks} {'rank' if chosen.ranks == 1 else 'ranks'}"
    return f"{report.described(chosen)} ({count}, {written_size(chosen.peak)} each)"
