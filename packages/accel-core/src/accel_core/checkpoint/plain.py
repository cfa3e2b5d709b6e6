"""The format of strategies that keep whole models on every rank: one file for each model and optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_core.checkpoint import model, names, optimizer, payload, pickles
from accel_core.checkpoint.format import CheckpointFormat, Part, Source
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.report import Restoration
from accel_core.checkpoint.run import Run
from accel_core.process import world

__all__ = ["PLAIN", "PlainFormat", "load", "save"]


class PlainFormat:
    """Whole models and optimizers, written by one rank and read by all."""

    def parts(
        self,
        run: Run,
        weights: Sequence[dict[str, Tensor]],
        *,
        writes: bool,
        safe_serialization: bool,
        **kwargs: object,
    ) -> list[Part]:
        """Return what this rank writes: everything, or nothing.

        Args:
            run: The run.
            weights: State dicts of the models, after the save hooks.
            writes: Whether this rank writes what all ranks of its disk share.
            safe_serialization: Use safetensors for weights.
            **kwargs: Not used.
        """
        if not writes:
            return []
        parts: list[Part] = []
        for index, state in enumerate(weights):
            name = names.model_name(index, safe=safe_serialization)
            parts.append(FilePart(name, "tensors" if safe_serialization else "object", state))
        for index, own in enumerate(run.optimizers):
            parts.append(FilePart(names.optimizer_name(index), "object", own.state_dict()))
        return parts

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with the models, changing nothing, and return how each is restored.

        Args:
            run: The run.
            models: The models that the load hooks left to be loaded.
            source: The checkpoint.
        """
        return [model.restoration(own, index, source, run.world.rank) for index, own in enumerate(models)]

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how each is restored."""
        return [optimizer.restoration(own, index, source, run.world.rank) for index, own in enumerate(run.optimizers)]


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
        CheckpointError: `safe_serialization` and something that is no tensor.
    """
    here = world.ensure()
    if not (here.is_local_main if save_on_each_node else here.is_main):
        return
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            payload.stream_tensors(f, obj)
        else:
            torch.save(obj, f)
        return
    path = Path(f)
    staging = names.beside(path, names.STAGING, names.fresh_id())
    try:
        if safe_serialization:
            payload.write_tensors(staging, obj)
        else:
            payload.write_object(staging, obj)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what `save` wrote in torch's format; nothing that the file holds is executed unless you say so.

    Args:
        f: Path, or an open binary file.
        map_location: As in `torch.load`.
        **kwargs: Passed to `torch.load`; `weights_only=False` gives up the protection.

    Raises:
        UnsafeCheckpointError: Reading it would run code, or it is no regular file.
        CheckpointDamagedError: It is truncated or in another format.
        CheckpointNotFoundError: There is no such file.
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
