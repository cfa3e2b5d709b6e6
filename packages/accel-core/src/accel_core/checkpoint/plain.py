"""The format of strategies that keep whole models on every rank: one file for each model and optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from accel_core.checkpoint import model, names, optimizer, pickles, tensor_file
from accel_core.checkpoint.format import CheckpointFormat, FilePart, Part, Run, SaveRequest, Source
from accel_core.checkpoint.report import Restoration
from accel_core.comm.tree import tree_leaves
from accel_core.errors import CheckpointError, undone_by
from accel_core.mesh.tensor import is_spread
from accel_core.modules.unwrap import extract_model_from_parallel
from accel_core.process.world import ensure


class PlainFormat:
    """Whole models and optimizers, written by one rank and read by all."""

    has_models_apart = True
    """Whether models can be saved without their optimizers."""

    has_adapters_apart = True
    """Whether of a model those weights can be saved alone that PEFT added; of a subclass, if it says so itself."""

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return whole state dicts of the models; every rank calls it."""
        return [run.strategy.state_dict(own) for own in run.models]

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes: everything, or nothing."""
        if not request.writes:
            return []
        return parts(request.weights, [own.state_dict() for own in request.run.optimizers], safe=request.safe)

    def recognises(self, source: Source) -> bool:
        """Return whether there are whole weights, and no files of FSDP: one of the two would be of an older save."""
        files = source.files()
        fsdp = any(names.engine_of(name) == "FSDP" for name in files)
        return not fsdp and any(names.is_model(name) for name in files)

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return all files: every rank reads whole models."""
        return source.files()

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare the checkpoint with the models, changing nothing."""
        return [model.restoration(own, index, source, run.world.rank) for index, own in enumerate(models)]

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare the checkpoint with the optimizers, changing nothing."""
        return [optimizer.restoration(own, index, source, run.world.rank) for index, own in enumerate(run.optimizers)]


def parts(weights: Sequence[dict[str, Any]], optimizers: Sequence[dict[str, Any]], *, safe: bool) -> list[Part]:
    """Return the files of whole states of models and optimizers."""
    kind: Literal["tensors", "object"] = "tensors" if safe else "object"
    found: list[Part] = [FilePart(names.model_name(i, safe=safe), kind, state) for i, state in enumerate(weights)]
    for index, state in enumerate(optimizers):
        if any(map(is_spread, tree_leaves(state))):
            raise CheckpointError(
                f"A plain checkpoint holds whole states; got parts of tensors that other ranks hold too in optimizer "
                f"{index}. Give the strategy a format that gathers them, or writes every rank's parts."
            )
        found.append(FilePart(names.numbered(names.OPTIMIZER_NAME, index), "object", state))
    return found


def models_for_hooks(run: Run) -> list[Any]:
    """Return the models as Accelerate's hooks know them: whole ones as they were before `prepare` wrapped them."""
    if type(run.strategy.format) is not PlainFormat:
        return list(run.models)
    return [extract_model_from_parallel(model, keep_torch_compile=False) for model in run.models]


PLAIN: CheckpointFormat = PlainFormat()
"""The format of one process and of replicated models."""


def save(
    obj: Any, f: str | os.PathLike[str] | Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object once, or once on each machine; a file is replaced in one step.

    Args:
        obj: What to save; a dict of tensors for `safe_serialization`.
        f: Path, or an open binary file.
        save_on_each_node: Save on the first process of every machine instead of on the first of all.
        safe_serialization: Write safetensors instead of `torch.save`.

    Raises:
        CheckpointError: `safe_serialization` and something that is not a tensor.

    Examples:
        >>> save({"step": 100}, "notes.pt")
        >>> load("notes.pt")
        {'step': 100}
        >>> save(model.state_dict(), "weights.safetensors", safe_serialization=True)
    """
    world = ensure()
    if not (world.is_local_main if save_on_each_node else world.is_main):
        return
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            tensor_file.stream_tensors(f, obj)
            tensor_file.warn_of_shared(obj)
        else:
            torch.save(obj, f)
        return
    path = Path(f)
    staging = path.with_name(f"{names.HIDDEN}{names.fresh_id()}")
    with undone_by(lambda: staging.unlink(missing_ok=True)):
        if safe_serialization:
            tensor_file.write_tensors(staging, obj)
        else:
            pickles.write_object(staging, obj)
        os.replace(staging, path)
    if safe_serialization:
        tensor_file.warn_of_shared(obj)


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what `save` wrote in torch's format; nothing that the file holds is executed unless you say so.

    Args:
        f: Path, or an open binary file.
        map_location: As in `torch.load`.
        **kwargs: Passed to `torch.load`; `weights_only=False` gives up the protection.

    Returns:
        The object that was saved.

    Raises:
        UnsafeCheckpointError: Reading it would run code, or it is not a regular file.
        CheckpointDamagedError: It is truncated or in another format.
        CheckpointNotFoundError: There is no such file.

    Examples:
        >>> save(model.state_dict(), "weights.pt")
        >>> model.load_state_dict(load("weights.pt", map_location="cpu"))
        <All keys matched successfully>
    """
    options = {"weights_only": True} | kwargs
    if not options["weights_only"]:
        return torch.load(f, map_location=map_location, **options)
    if not isinstance(f, (str, os.PathLike)):
        return pickles.load_object(
            f, Path(str(getattr(f, "name", "an open file"))), map_location=map_location, **options
        )
    with pickles.open_plain(f) as file:
        return pickles.load_object(file, Path(f), map_location=map_location, **options)
