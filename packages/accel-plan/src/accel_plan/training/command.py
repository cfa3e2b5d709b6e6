"""What `accel plan --train` does."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from accel_bigmodel.checkpoint.skeleton import Part, model_of_config, skeleton_of
from accel_bigmodel.sizes import number_or_text
from accel_core.errors import ConfigurationError
from accel_core.mesh.spec import parse_layouts
from accel_core.modules.sizes import as_dtype, convert_file_size_to_int, written_size
from accel_plan.checkpoint import model_of, named
from accel_plan.output import write_output
from accel_plan.training import report
from accel_plan.training.prediction import TrainingMemory, predict
from accel_plan.training.search import tried, ways_of
from accel_plan.training.sharing import check_layout
from accel_plan.training.workload import Loss, TrainingWorkload, optimizer_written

_AS_GIVEN = ("batch", "accumulation", "sequence", "sample", "reduce_bucket", "microbatches", "chunk_logits")


def maker_of(name: str) -> Callable[[], nn.Module]:
    """Return what makes the model that a command line names, with parameters on the meta device."""
    if not os.path.exists(name) and ":" in name:
        return partial(model_of, name)
    # Made anew at each call: a model that was split or sharded for one layout cannot be for another.
    make = partial(skeleton_of if os.path.exists(name) else model_of_config, name)
    if isinstance(make(), Part):
        raise ConfigurationError(
            "A training step runs the model's forward, which headers do not describe; got no config.json for "
            f"{name!r} whose model transformers has. Name the model as MODULE:NAME."
        )
    return make


def workload_of(args: argparse.Namespace) -> TrainingWorkload:
    """Return the training step that a command line describes."""
    optimizer, arguments = optimizer_written(args.optimizer)
    loss: Loss | None = None if args.loss is None else named(args.loss, "the loss")
    dtype = as_dtype(args.dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"Weights are trained in a floating point dtype; got --dtype {args.dtype}. Use float32, bfloat16 or "
            "float16."
        )
    return TrainingWorkload(
        **{name: vars(args)[name] for name in _AS_GIVEN},
        precision=args.mixed_precision,
        dtype=dtype,
        optimizer=optimizer,
        optimizer_arguments=arguments,
        loss=loss,
        tensor_plan=args.tp_plan or "auto",
        split=None if args.split is None else args.split.split(","),
    )


def _compared(
    args: argparse.Namespace, make: Callable[[], nn.Module], workload: TrainingWorkload, way: bool | None
) -> list[TrainingMemory]:
    """Find the memory on each layout that was named; of pipelines, under each schedule."""
    schedules = args.schedule.split(",")
    tasks = [
        (spec, replace(workload, schedule=each))
        for spec in parse_layouts(args.layout or "single")
        for each in (schedules if spec.size("pp") > 1 else schedules[:1])
    ]
    for spec, own in tasks:
        check_layout(spec, own)
    ways = ways_of(make(), way)
    return [predict(make, spec, own, checkpointing=each) for spec, own in tasks for each in ways]


def run(args: argparse.Namespace) -> int:
    """Find the memory of training."""
    limit = None if args.fits is None else convert_file_size_to_int(number_or_text(args.fits))
    workload, make = workload_of(args), maker_of(args.checkpoint)
    way = None if args.checkpointing is None else args.checkpointing == "yes"
    if limit is not None and args.layout is None:
        rows = list(tried(make, workload, limit, ranks=args.ranks, checkpointing=way))
    else:
        rows = _compared(args, make, workload, way)
    fitting = [row for row in rows if limit is not None and row.peak <= limit]
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
    sample = (
        f"sequences of {workload.sequence}"
        if workload.sequence
        else f"samples of {'x'.join(map(str, workload.sample or ()))}"
    )
    title = f"{args.checkpoint}: a batch of {workload.batch} {sample}, {workload.optimizer}, mixed precision " + (
        workload.precision
    )
    lines = [f"{title}. Bytes of each rank at the peak:", "", report.table(rows, limit)]
    if limit is not None:
        verdict = "No layout of these fits" if chosen is None else f"The smallest layout that fits is {_words(chosen)}"
        lines += ["", f"{verdict} in {written_size(limit)}."]
    stages = report.pipelines(rows)
    lines += ["", stages] if stages else []
    sys.stdout.write("\n".join(lines) + "\n")
    write_output(args.svg, partial(report.svg, title, rows, limit))
    write_output(args.json, partial(report.to_json, rows, limit, chosen))


def _words(chosen: TrainingMemory) -> str:
    count = f"{chosen.ranks} {'rank' if chosen.ranks == 1 else 'ranks'}"
    return f"{report.described(chosen)} ({count}, {written_size(chosen.peak)} each)"
