"""Writing and reading the parts of a run's state in a folder that exists, one call for all of them.

These functions have the interface of `accelerate.checkpointing`. `folder.save_state` is what survives a kill.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core.checkpoint import names, pickles, plain, stateful
from accel_core.checkpoint.format import Part, Source
from accel_core.checkpoint.load import placement
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.plain import PLAIN
from accel_core.checkpoint.report import RestoreReport
from accel_core.checkpoint.run import BareRun
from accel_core.process import world as process


def save_accelerator_state(
    output_dir: str,
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the parts of a run's state into a folder.

    Raises:
        CheckpointError: A state cannot be written.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    world = replace(process.ensure(), rank=process_index)  # the caller's number counts, as it names files
    run = BareRun([], optimizers, schedulers, dataloaders, scaler=scaler, world=world, step=step)
    writes = world.is_local_main if save_on_each_node else world.is_main
    states = [own.state_dict() for own in optimizers] if writes else []  # others would copy them for nothing
    shared = [*plain.parts(model_states, states, safe=safe_serialization), *stateful.parts(run)] if writes else []
    for part in [*shared, stateful.random_part(run)]:
        _write(part, folder, process_index)
    return folder


def _write(part: Part, folder: Path, rank: int) -> None:
    """Write a part under another name first, so that a file that is there is replaced in one step."""
    with tempfile.TemporaryDirectory(prefix=names.HIDDEN, dir=folder) as staging:
        for entry in part.write(Path(staging), rank):
            os.replace(Path(staging) / entry.name, folder / entry.name)


def load_accelerator_state(
    input_dir: str,
    models: list[nn.Module],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: object = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: object,
) -> dict[str, Any]:
    """Read the parts of a run's state from a folder, after all of them were found to fit; return what it has: `step`.

    Raises:
        CheckpointError: Something is missing, damaged or does not fit; nothing was changed.
        TypeError: `map_location` is neither "cpu" nor "on_device".
    """
    folder = Path(input_dir)
    world = replace(process.ensure(), rank=process_index)  # as it names files
    run = BareRun(models, optimizers, schedulers, dataloaders, scaler=scaler, world=world)
    options = placement(map_location, world) | (load_kwargs or {})
    # Every rank that saved left one, and no manifest need be there.
    stored = len(list(folder.glob(f"{names.RNG_STATE_NAME}_*.pkl")))
    source = Source(folder, Manifest.read(folder), max(1, stored), options, load_model_func_kwargs)
    plans = PLAIN.model_restorations(run, models, source)
    plans += stateful.restorations(run, source, PLAIN.optimizer_restorations(run, source))
    report = RestoreReport(folder, source.world_size, findings=[found for plan in plans for found in plan.findings])
    error = report.error()
    if error is not None:
        raise error
    for plan in plans:  # only now that all fit
        plan.apply()
    return {"step": run.step}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Save the state of one object as `custom_checkpoint_<index>.pkl`.

    Raises:
        UnsafeCheckpointError: The state could not be read back without running code.
    """
    state = obj.state_dict()
    # Before it is written: found when it is loaded, it would be lost.
    pickles.prove_readable(state, f"registered object {index} ({type(obj).__name__})")
    plain.save(state, Path(path) / names.custom_name(index), save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load the state of one object from `custom_checkpoint_<index>.pkl`.

    Raises:
        CheckpointError: The file is damaged or would run code.
        FileNotFoundError: The file does not exist.
    """
    obj.load_state_dict(pickles.read_object(Path(path), names.custom_name(index)))
