"""The door through which a strategy decides how models and optimizers lie in a checkpoint.

Saving: `CheckpointFormat.weights`, the save hooks, `parts`, in which ranks may still talk; then, when all ranks have
planned, `Part.write` of each, which talks to nobody, and `SharedPart.conclude` on the rank that completes the folder.
Loading: `recognises`, `files_of`, `optimizer_restorations`, `model_restorations`; then, when all ranks agree,
`Restoration.apply` of each. Every rank calls all of them.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from accel_core._records import record
from accel_core.checkpoint import names, pickles, tensor_file
from accel_core.checkpoint.manifest import Entry, Manifest, read_json, write_bytes, write_json
from accel_core.checkpoint.report import Restoration
from accel_core.checkpoint.staging import Buffers
from accel_core.errors import CheckpointMismatchError
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World

_T = TypeVar("_T")


class Exchange(Protocol):
    """How ranks talk while a save is planned."""

    def __call__(self, value: _T) -> list[_T]:
        """Return the value that each rank brought; every rank calls it equally often.

        Raises:
            CheckpointError: A rank failed instead; every rank raises the same.
        """


class ModelHolder(Protocol):
    """How the models of a run live: what checkpoints ask of its strategy."""

    @property
    def format(self) -> CheckpointFormat:
        """How models and optimizers are written, and the first that is asked when they are read."""

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a model; every rank calls it.

        Args:
            model: A prepared model.
            unwrap: Under the names of the bare model; else under those of what wraps it.
        """


class Run(Protocol):
    """Everything of a run that is saved and restored: what `Runtime` has, and `BareRun`."""

    models: list[nn.Module]  # these and the next three as `prepare` returned them
    optimizers: list[Any]
    schedulers: list[Any]
    dataloaders: list[Any]
    custom_objects: list[Any]  # what was registered for checkpointing
    step: int  # accumulation counter
    project: ProjectConfiguration
    data: DataLoaderConfiguration  # how loaders are prepared and restored
    scaler: torch.amp.GradScaler | None  # gradient scaler, if precision needs one
    world: World  # this process among its fellows
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]]  # called with models, weights and folder
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]]  # called with models and folder

    @property
    def strategy(self) -> ModelHolder:
        """How the models live."""


@record(frozen=True)
class Source:
    """A checkpoint that is being restored."""

    folder: Path
    manifest: Manifest | None  # `None` for a folder of Accelerate
    world_size: int  # number of ranks that wrote it
    load_kwargs: dict[str, Any]  # what the user passes to the reader of plain objects (`map_location`)
    model_kwargs: dict[str, Any]  # what the user passes to `load_state_dict` of models
    only: str = ""  # one file, or the folder of one set of shards, to which it is restricted

    @property
    def plain_kwargs(self) -> dict[str, Any]:
        """What the reader of anything but models and optimizers is passed: generators take no state on a device."""
        return {name: value for name, value in self.load_kwargs.items() if name != "map_location"}

    def files(self) -> list[str]:
        """Return the names of its files: what the manifest lists, or documented names in a folder of Accelerate."""
        if self.manifest is not None:
            return [entry.name for entry in self.manifest.entries]
        found = names.found_in(self.folder)
        return [name for name in found if self.only in ("", name, name.partition("/")[0])]

    def has(self, name: str) -> bool:
        """Return whether a file is due: listed in the manifest or, in a folder of Accelerate, there."""
        return (self.folder / name).exists() if self.manifest is None else name in self.manifest

    def read(self, name: str, **options: Any) -> Any:
        """Return what a file of this save holds: JSON, or what `torch.save` wrote."""
        self.check_listed(name)
        if name.endswith(".json"):
            return read_json(self.folder, name)
        return pickles.read_object(self.folder, name, **options)

    def check_listed(self, name: str) -> None:
        """Make sure that a file belongs to this save; a folder without a manifest has nothing to say about it."""
        if self.manifest is None or name in self.manifest:
            return
        if not os.path.lexists(self.folder / name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder / name))
        raise CheckpointMismatchError(
            f"{name} is in {str(self.folder)!r} but belongs to no save that is there: its manifest does not list it. "
            "Move the file away, or save again."
        )


class Part(Protocol):
    """Something that one rank writes into a checkpoint: one file, or several."""

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Return an entry for every file, after writing it into `folder` and flushing it to disk.

        It must not talk to other ranks: one of them may have failed before it came here.

        Args:
            folder: Where the checkpoint is staged.
            rank: This rank.
        """

    def snapshot(self, buffers: Buffers) -> Part:
        """Return a copy that later changes of the run do not reach; tensors go into the reused `buffers`.

        Args:
            buffers: Memory that is allocated once and used by every save.
        """


@record(frozen=True)
class FilePart:
    """One file of a checkpoint, whose name is a path with forward slashes."""

    name: str
    kind: Literal["tensors", "object", "json", "bytes"]  # safetensors, what `torch.save` writes, JSON, as they are
    content: Any

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write the file and flush it to disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[str, Callable[..., Entry]] = {
            "tensors": tensor_file.write_tensors,
            "object": pickles.write_object,
            "json": write_json,
            "bytes": write_bytes,
        }
        return [replace(writers[self.kind](path, self.content, rank=rank), name=self.name)]

    def snapshot(self, buffers: Buffers) -> FilePart:
        """Return a copy that later training steps do not change."""
        return replace(self, content=buffers.copy(self.content, self.name))


@record(frozen=True)
class SaveRequest:
    """What a format is asked to write."""

    run: Run
    weights: Sequence[dict[str, Any]]  # what `CheckpointFormat.weights` returned, after the save hooks
    writes: bool  # whether this rank writes what all ranks of its disk share
    exchange: Exchange  # how ranks agree on who writes what
    safe: bool = True  # use safetensors for whole weights
    kept: Sequence[set[str]] | None = None  # names of the weights that are saved of each model, if not of all


@runtime_checkable
class SharedPart(Part, Protocol):
    """A part that every rank has, under one name, and that one of them concludes when all have written theirs."""

    name: str  # what it is called among the parts of a rank
    is_known: bool  # whether the rank that concludes knows `note` from the save before; if all are, none is sent

    @property
    def note(self) -> object:
        """What the rank that concludes has to know of what `write` did.

        It is sent to the rank that concludes.
        """

    def conclude(self, folder: Path, rank: int, notes: Sequence[object]) -> list[Entry]:
        """Return an entry for every file that could only be written now, when all ranks have written theirs.

        Args:
            folder: Where the checkpoint is staged.
            rank: This rank.
            notes: `note` of each rank; none where all are known.
        """


class CheckpointFormat(Protocol):
    """How a strategy's models and optimizers lie in a checkpoint; see the head of this file for the order of calls."""

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return what save hooks get: whole state dicts of the models, which they may change.

        A list that is empty for a format that writes models by itself.

        Args:
            run: The run.
        """

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes.

        Args:
            request: What is saved, and how.
        """

    def recognises(self, source: Source) -> bool:
        """Return whether a checkpoint holds models as this format writes them, judged by names alone.

        Args:
            source: The checkpoint.
        """

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return those of `source.files()` that a rank reads; files of other formats are read on every rank.

        Args:
            source: The checkpoint.
            rank: A rank of those that load, not only this one.
            size: Number of ranks that load.
        """

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Return how each model is restored, in their order, after comparing without a change.

        Args:
            run: The run.
            models: The models that the load hooks left to be loaded.
            source: The checkpoint.
        """

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Return how each optimizer is restored, in their order, after comparing without a change.

        Args:
            run: The run.
            source: The checkpoint.
        """
