"""Writing shards as `torch.distributed.checkpoint` lays them, inside a save of accel.

torch's planner decides which rank writes which piece; the ranks tell each other their plans once, before anything is
written. Then every rank writes its shard alone, also in the background, and tells with its list of files where each
piece came to lie. The rank that completes the folder (the committer) writes the list of shards, and then the manifest.

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
from dataclasses import replace
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
from accel_core.checkpoint.tensor_file import buffer_of
from accel_parallel.checkpoint.metadata import METADATA_NAME

__all__ = ["Plans", "ShardPart", "plan"]

_VERSION = "1.0.0"
"""Of torch's format."""

Placed = tuple[MetadataIndex, int, int]
"""A value of a shard: which, its first byte, and how many."""


class Plans:
    """What ranks agreed on when they saved last, for as long as no rank's own part of it changes."""

    def __init__(self) -> None:
        self.agreements = 0  # the same on all ranks that took part in the last one
        self.local: dict[str, SavePlan] = {}
        self.agreed: dict[str, tuple[SavePlan, bytes]] = {}  # what this rank writes, and the list of all shards


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
    known = exchange((kept.agreements, local == kept.local)) if plans else [(0, False)]
    if len(set(known)) > 1 or not known[0][1]:
        everybody = exchange(local)
        for folder, planner in planners.items():
            # Every rank derives the same global plan from the same local ones, so one exchange is enough.
            globally, listed = planner.create_global_plan([each[folder] for each in everybody])
            # As bytes, which take little memory until the next save, and only the committer needs more.
            kept.agreed[folder] = globally[rank], pickle.dumps(listed)
        kept.local, kept.agreements = local, max(known)[0] + 1
    parts = []
    for folder, planner in planners.items():
        own, metadata = kept.agreed[folder]
        values = {item.index: planner.resolve_data(item) for item in planner.finish_plan(own).items}
        plain = {index: one.getvalue() if isinstance(one, io.BytesIO) else one for index, one in values.items()}
        parts.append(ShardPart(folder, metadata, plain))
    return parts


@record
class ShardPart:
    """What one rank writes into a folder of shards, and the list of all of them on the rank that completes the save."""

    name: str
    metadata: bytes  # what all ranks write together, without the places: torch's `Metadata`, pickled
    # what this rank writes: tensors, and other values as `torch.save` wrote them
    values: dict[MetadataIndex, Tensor | bytes]
    note: list[Placed] | None = None  # where `write` put each value; the other ranks are told

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write this rank's shard and flush it to disk."""
        self.note = []
        if not self.values:
            return []
        name = _shard_of(rank)
        place = folder / self.name
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
        """Write the list of shards, after every rank has written its own."""
        storage: dict[MetadataIndex, Any] = {}
        for other, placed in enumerate(notes):
            for index, start, length in placed or ():  # type: ignore[attr-defined]
                storage[index] = storage_info(_shard_of(other), start, length)
        complete: Metadata = replace(pickle.loads(self.metadata), storage_data=storage)
        if hasattr(complete, "version"):  # older ones write none: 2.8 does not, 2.11 does
            complete.version = _VERSION
        (folder / self.name).mkdir(exist_ok=True)
        with HashingFile(folder / self.name / METADATA_NAME) as file:
            file.write(pickle.dumps(complete))
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
    if tensor.untyped_storage().size() == tensor.nbytes:
        return tensor
    seen_as_stored = not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if type(tensor) is not Tensor or not tensor.numel() or not tensor.is_contiguous() or not seen_as_stored:
        return tensor.clone()
    # The same memory, good for as long as the tensor is: fresh memory costs more than writing.
    return torch.frombuffer(buffer_of(tensor), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
