"""How the ranks of a save or restore tell one another what happened."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from accel_core.comm.control import Channel
from accel_core.errors import AccelError, CheckpointError, RankDisagreementError, RemoteRankError
from accel_core.process.world import World

__all__ = ["Ranks"]

_T = TypeVar("_T")
_ADVICE = "See to the cause and call again; what was there before is intact."


class Ranks:
    """The ranks that save or restore together.

    Args:
        world: This process among its fellows.
        operation: What they do, as the user calls it.
        lane: A name for ranks that talk in a thread beside training, on a process group of their own; every rank has to
            make the first one of a name at the same point.
    """

    def __init__(self, world: World, operation: str = "save_state or load_state", *, lane: str = "") -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = world.rank
        self.size = world.size if together else 1
        found = world if together else replace(world, size=1)
        self._channel = Channel(found, operation, lane=lane, patient=True)

    def exchange(self, value: _T) -> list[_T]:
        """Return the value that each rank brought; every rank calls it.

        Raises:
            RankDisagreementError: A rank is in another operation; every rank names every rank's line.
            RemoteRankError: A rank is gone, or the group's timeout passed.
        """
        try:
            return self._channel.exchange(value)
        except RankDisagreementError:
            raise
        except RemoteRankError as error:
            raise RemoteRankError(
                f"Rank {self.rank} lost another rank during a checkpoint operation; got {error} "
                "The checkpoint that was there before is intact; start the run again from it."
            ) from error

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
