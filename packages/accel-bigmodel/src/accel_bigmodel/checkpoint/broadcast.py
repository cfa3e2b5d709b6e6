"""A checkpoint that the first process reads and sends to all others, tensor by tensor."""

import os

import torch

from accel_bigmodel.checkpoint.read import Checkpoint, open_checkpoint
from accel_core.comm.collectives import broadcast
from accel_core.comm.control import agree
from accel_core.comm.objects import broadcast_object_list
from accel_core.errors import CheckpointError
from accel_core.process.world import ensure

__all__ = ["open_on_rank0"]


class _SharedShard:
    """All tensors of a checkpoint, seen by every process."""

    def __init__(
        self, path: str, table: dict[str, tuple[tuple[int, ...], torch.dtype]], source: Checkpoint | None
    ) -> None:
        self.path = path
        self._table = table
        self._source = source

    def names(self) -> list[str]:
        """List the tensors."""
        return list(self._table)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._table[name][0]

    def floating(self, name: str) -> bool:
        """Return whether a tensor holds floating point numbers."""
        return self._table[name][1].is_floating_point

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor; every process has to ask for it, in the same order."""
        shape, dtype = self._table[name]
        if self._source is not None:
            tensor = self._source.shard_of(name).tensor(name).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        sent: torch.Tensor = broadcast(tensor.to(ensure().device), from_process=0)
        return sent.to("cpu")

    def done_with(self, name: str) -> None:
        """Let a tensor of the source go."""
        if self._source is not None:
            self._source.shard_of(name).done_with(name)

    def close(self) -> None:
        """Let the source's tensors go."""
        if self._source is not None:
            for shard in self._source.shards:
                shard.close()


def open_on_rank0(checkpoint: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint on the first process alone; the others get its tensors from there.

    Raises:
        CheckpointError: On the first process, as `open_checkpoint` does; the others raise that it failed.
    """
    world = ensure()
    if world.size == 1:
        return open_checkpoint(checkpoint)
    source: Checkpoint | None = None
    failure: CheckpointError | None = None
    table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if world.is_main:
        try:
            source = open_checkpoint(checkpoint)
            for name in source:
                shard = source.shard_of(name)
                table[name] = shard.shape(name), shard.tensor(name).dtype
        except CheckpointError as found:
            failure = found
    agree(failure, "open a checkpoint")
    carried = broadcast_object_list([table])
    return Checkpoint([_SharedShard(os.fspath(checkpoint), carried[0], source)], None)
