"""A checkpoint that the first process reads and sends to all others, tensor by tensor."""

import contextlib
import os

import torch
from torch import nn

from accel_bigmodel.checkpoint.read import Checkpoint, open_checkpoint
from accel_bigmodel.checkpoint.shard import Shard
from accel_core.checkpoint.tensor_file import StoredTensor
from accel_core.comm.collectives import broadcast
from accel_core.comm.control import Channel
from accel_core.comm.objects import broadcast_object_list
from accel_core.process.world import ensure

_OPENING = "open a checkpoint"


class _SharedShard(Shard):
    """All tensors of a checkpoint, seen by every process."""

    path = "the first process"

    def __init__(self, *, share: bool) -> None:
        self.share = share
        self.entries: dict[str, StoredTensor] = {}
        self.source: Checkpoint | None = None

    def read_from(self, source: Checkpoint) -> None:
        """Take the tensors from a checkpoint, on the process that has it."""
        self.source = source
        for name in source if self.share else ():
            shard = source.shard_of(name)
            self.entries[name] = StoredTensor(shard.tensor(name).dtype, shard.shape(name), 0, 0)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor; every process has to ask for it, in the same order."""
        if self.source is not None:
            tensor = self.source.own(name).contiguous()
        else:
            tensor = torch.empty(self.shape(name), dtype=self.entries[name].dtype, device="cpu")
        sent: torch.Tensor = broadcast(tensor.to(ensure().device), from_process=0)
        return sent.to("cpu")

    def done_with(self, name: str) -> None:
        """Release a tensor of the source."""
        if self.source is not None:
            self.source.shard_of(name).done_with(name)

    def close(self) -> None:
        """Release the source's tensors."""
        if self.source is not None:
            for shard in self.source.shards:
                shard.close()


def together(doing: str, *, share: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context out of which all processes that share a checkpoint come together: if one fails, all do."""
    world = ensure()
    return Channel(world, doing).together(doing) if share and world.size > 1 else contextlib.nullcontext()


def open_on_rank0(
    checkpoint: str | os.PathLike[str], model: nn.Module, *, share: bool, packed: bool = True
) -> Checkpoint:
    """Open a checkpoint; with `share`, only the first process opens it and sends its tensors, unpacked, to the others.

    Raises:
        CheckpointError: On a process that opens it, as `open_checkpoint` does; the others raise that it failed.
    """
    world = ensure()
    shard = _SharedShard(share=share and world.size > 1)
    # Together, so that all processes learn of a checkpoint that the first one cannot open.
    with together(_OPENING, share=share):
        if world.is_main or not shard.share:
            shard.read_from(open_checkpoint(checkpoint, model, packed=packed and not shard.share))
    if shard.source is not None and not shard.share:
        return shard.source
    shard.entries = broadcast_object_list([shard.entries])[0]
    return Checkpoint([shard], None)
