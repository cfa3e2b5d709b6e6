"""How the ranks of a save or restore tell one another what happened."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_core.checkpoint.payload import buffer_of
from accel_core.errors import AccelError, CheckpointError, RemoteRankError
from accel_core.process.world import World

__all__ = ["Ranks"]

_T = TypeVar("_T")
_ADVICE = "See to the cause and call again; what was there before is intact."


class Ranks:
    """The ranks that save or restore together.

    Args:
        world: This process among its fellows.
        group: A gloo group to talk over; the default group where `None`.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None) -> None:
        self.rank = world.rank
        self.size = world.size if dist.is_available() and dist.is_initialized() else 1
        self._group = group
        self._device = world.device if group is None else torch.device("cpu")

    def exchange(self, value: _T) -> list[_T]:
        """Return the value that each rank brought; every rank calls it.

        Raises:
            RemoteRankError: A rank is gone, or the group's timeout passed.
        """
        if self.size == 1:
            return [value]
        try:
            return self._gather(pickle.dumps(value))
        except (RuntimeError, ValueError) as error:
            raise RemoteRankError(
                f"Rank {self.rank} lost another rank during a checkpoint operation; found {error}. "
                "The checkpoint that was there before is intact; start the run again from it."
            ) from error

    def _gather(self, content: bytes) -> list[Any]:
        """Gather pickled values of any length; torch's own way of doing so needs NumPy."""
        device = self._device
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        dist.all_gather_single(lengths, torch.tensor([len(content)], device=device), group=self._group)
        longest = int(lengths.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everything = torch.zeros(self.size * longest, dtype=torch.uint8, device=device)
        dist.all_gather_single(everything, mine.to(device), group=self._group)
        memory = buffer_of(everything.cpu())
        starts = range(0, self.size * longest, longest)
        return [pickle.loads(memory[at : at + length]) for at, length in zip(starts, lengths.tolist(), strict=True)]

    def agree(self, failure: Exception | None, doing: str, advice: str = _ADVICE) -> None:
        """Raise on every rank if any rank failed; every rank calls it.

        Args:
            failure: What went wrong on this rank, or `None`.
            doing: What the ranks were doing, such as `Writing the checkpoint 'ckpt'`.
            advice: What to do about it.

        Raises:
            CheckpointError: The same text on every rank. It is the class that the lowest failing rank met, if that is
                one of accel's.
        """
        described: tuple[type[AccelError], str] | None = None
        if failure is not None:
            if isinstance(failure, AccelError) and type(failure).__module__ == AccelError.__module__:
                described = (type(failure), str(failure))
            else:
                described = (CheckpointError, f"{type(failure).__name__}: {failure}")
        outcomes = self.exchange(described)
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
        if not failed:
            return
        if self.size == 1 and isinstance(failure, AccelError):
            raise failure
        kind = next(iter(failed.values()))[0]
        text = "\n".join(f"rank {rank}: {message}" for rank, (_, message) in failed.items())
        raise kind(f"{doing} failed; found:\n{text}\n{advice}") from failure
