"""The door through which a strategy decides how models and optimizers lie in a checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from accel_core._records import record
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.report import Restoration
from accel_core.checkpoint.run import Run
from accel_core.checkpoint.staging import Buffers
from accel_core.errors import CheckpointMismatchError

__all__ = ["CheckpointFormat", "Part", "Source"]


@record(frozen=True)
class Source:
    """A checkpoint that is being restored.

    Attributes:
        folder: Where it lies.
        manifest: Its list of files, or `None` for a folder of Accelerate.
        world_size: Number of ranks that wrote it.
        load_kwargs: What the user passes to the reader of plain objects (`map_location`).
        model_kwargs: What the user passes to `load_state_dict` of models.
    """

    folder: Path
    manifest: Manifest | None
    world_size: int
    load_kwargs: dict[str, Any]
    model_kwargs: dict[str, Any]

    def check_listed(self, name: str) -> None:
        """Make sure that a file belongs to this save; a folder without a manifest has nothing to say about it.

        Raises:
            CheckpointMismatchError: The file is there, and the manifest does not list it.
            FileNotFoundError: It is neither listed nor there.
        """
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

    @property
    def concurrent(self) -> bool:
        """Whether it may be written in a thread, beside others; not if it talks to other ranks meanwhile."""

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write into `folder`, flush to disk, and return what was written."""

    def snapshot(self, buffers: Buffers) -> Part:
        """Return a copy that later changes of the run do not reach; tensors go into the reused `buffers`."""


class CheckpointFormat(Protocol):
    """How a strategy's models and optimizers lie in a checkpoint.

    Called in this order: `parts` when saving; when loading `optimizer_restorations` and `model_restorations`,
    then, after all ranks agreed, `apply` of each. Every rank calls all of them.
    """

    def parts(
        self,
        run: Run,
        weights: Sequence[dict[str, Tensor]],
        *,
        writes: bool,
        safe_serialization: bool,
        **kwargs: object,
    ) -> list[Part]:
        """Return what this rank writes.

        Args:
            run: The run.
            weights: State dicts of the models, after the save hooks.
            writes: Whether this rank writes what all ranks of its disk share.
            safe_serialization: Use safetensors for weights.
            **kwargs: What the user passed to `save_state`.
        """

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with the models, changing nothing, and return how each is restored.

        Args:
            run: The run.
            models: The models that the load hooks left to be loaded.
            source: The checkpoint.
        """

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how each is restored."""
