"""Writing shards as `torch.distributed.checkpoint` lays them, inside a save of accel.

torch's planner decides which rank writes which piece; the ranks tell each other their plans once, before anything is
written. Then every rank writes its shard alone, also in the background, and tells the rank that completes the folder
(the committer) where each piece came to lie; nobody does where all lie as in the save before. The committer writes the
list of shards, and then the manifest. torch's own writer is not used: it writes no digests, and commits by itself.

Shards add nothing to the states that a crash can leave (see `commit`): they lie in the folder that a save is staged
in, and are placed like every other file. Where a save of two ranks is stopped, what is left is one of these:

| stopped after | staged | is | loading gives | next save |
|---|---|---|---|---|
| a rank wrote a part of its shard | `__0_0.distcp`, cut off | incomplete (3, 6) | what stood before | deletes it |
| one rank wrote its shard | `__0_0.distcp` | incomplete (3, 6) | what stood before | deletes it |
| all ranks wrote theirs | all shards | incomplete (3, 6) | what stood before | deletes it |
| the committer wrote the list | shards, `.metadata` | incomplete (3, 6) | what stood before | deletes it |
| the committer wrote the manifest | all of it, and manifest | prepared (4, 5, 7) | as for any save | as for any save |
| the commit | the same, committed | 8 | the new save, all of it | places it |
| a part of the shards was placed | the same, committed | 8, a mixture | the new save, all of it | places it |
| a save in whole files replaced them | no shards | 8 | the new save, all of it | removes the shards |

A rank that is killed leaves the others with an error that names it; they stage nothing more, and what was staged is
never a checkpoint, because the manifest is written last and lists every shard of every rank on its disk.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from accel_core._records import record
from accel_core._torch import storage_info
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.format import Exchange
from accel_core.checkpoint.manifest import Entry
from accel_core.checkpoint.staging import Buffers
from accel_parallel.checkpoint.metadata import METADATA_NAME

_VERSION = "1.0.0"
"""Of torch's format."""

Placed = tuple[MetadataIndex, int, int]
"""A value of a shard: which, its first byte, and how many."""


class Plans:
    """What ranks agreed on when they saved last, for as long as no rank's own part of it changes."""

    def __init__(self) -> None:
        self.local: dict[str, SavePlan] = {}
        self.agreed: dict[str, SavePlan] = {}  # what this rank writes
        # The list of all shards, as bytes, which take little memory until the next save.
        self.lists: dict[str, bytes] = {}
        self.notes: dict[str, list[Placed]] = {}  # what the rank that completes a save knows of this rank's values


def plan(
    states: Mapping[str, Mapping[str, Any]],
    rank: int,
    exchange: Exchange,
    made: Callable[[], DefaultSavePlanner] = DefaultSavePlanner,
    plans: Plans | None = None,
) -> list[ShardPart]:
    """Agree on which rank writes which piece of some states; every rank calls it.

    With the `plans` of an earlier save, ranks say whether theirs are what they were, and send them only if one is not.
    """
    kept = plans or Plans()
    planners = {folder: made() for folder in states}
    for folder, planner in planners.items():
        planner.set_up_planner(dict(states[folder]), is_coordinator=rank == 0)
    local = {folder: planner.create_local_plan() for folder, planner in planners.items()}
    if plans is None or not all(exchange(local == kept.local)):
        kept.local = {}  # until all is agreed: a rank that fails in between asks for it again
        everybody = exchange(local)
        for folder, planner in planners.items():
            # Every rank derives the same global plan from the same local ones, so one exchange is enough.
            globally, listed = planner.create_global_plan([each[folder] for each in everybody])
            kept.agreed[folder], kept.lists[folder] = globally[rank], pickle.dumps(listed)
        kept.local, kept.notes = local, {}
    parts = []
    for folder, planner in planners.items():
        items = planner.finish_plan(kept.agreed[folder]).items
        values = {item.index: planner.resolve_data(item) for item in items}
        plain = {index: one.getvalue() if isinstance(one, io.BytesIO) else one for index, one in values.items()}
        parts.append(ShardPart(folder, kept, plain))
    return parts


@record
class ShardPart:
    """What one rank writes into a folder of shards, and the list of all of them on the rank that completes the save."""

    name: str
    plans: Plans
    # what this rank writes: tensors, and other values as `torch.save` wrote them
    values: dict[MetadataIndex, Tensor | bytes]
    note: list[Placed] = field(default_factory=list)  # where `write` put each value
    is_known: bool = False  # whether the note is that of the save before

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write this rank's shard and flush it to disk."""
        self.note, before = [], self.plans.notes.pop(self.name, None)
        entries = self._write_values(folder / self.name, rank) if self.values else []
        self.is_known = self.note == before
        if rank:  # the one that completes the save knows all notes when it has written the list
            self.plans.notes[self.name] = self.note
        return entries

    def _write_values(self, place: Path, rank: int) -> list[Entry]:
        name = _shard_of(rank)
        place.mkdir(parents=True, exist_ok=True)
        with HashingFile(place / name) as file:
            for index, value in self.values.items():
                start = file.size
                if isinstance(value, bytes):
                    file.write(value)
                else:
                    torch.save(_own_memory(value), file)  # type: ignore[arg-type]
                self.note.append((index, start, file.size - start))
        return [Entry(f"{self.name}/{name}", file.size, file.digest, rank)]

    def conclude(self, folder: Path, rank: int, notes: Sequence[object]) -> list[Entry]:
        """Write the list of shards, after every rank has written its own; without notes it is that of the last save."""
        if notes:
            storage: dict[MetadataIndex, Any] = {}
            for other, placed in enumerate(notes):
                for index, start, length in placed or ():  # type: ignore[attr-defined]
                    storage[index] = storage_info(_shard_of(other), start, length)
            complete: Metadata = replace(pickle.loads(self.plans.lists[self.name]), storage_data=storage)
            if hasattr(complete, "version"):  # older ones write none: 2.8 does not, 2.11 does
                complete.version = _VERSION
            self.plans.lists[self.name] = pickle.dumps(complete)
        (folder / self.name).mkdir(exist_ok=True)
        with HashingFile(folder / self.name / METADATA_NAME) as file:
            file.write(self.plans.lists[self.name])
        self.plans.notes[self.name] = self.note
        return [Entry(f"{self.name}/{METADATA_NAME}", file.size, file.digest, rank)]

    def snapshot(self, buffers: Buffers) -> ShardPart:
        """Return a copy that later training steps do not change."""
        tensors = {str(index): value for index, value in self.values.items() if isinstance(value, Tensor)}
        copied = buffers.copy(tensors, self.name)
        return replace(self, values={index: copied.get(str(index), value) for index, value in self.values.items()})


def _shard_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU in memory of its own size: `torch.save` writes all the memory that it looks into."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()
