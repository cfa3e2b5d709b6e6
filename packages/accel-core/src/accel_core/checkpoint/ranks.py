"""How the ranks of a save or restore tell one another what happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from accel_core.checkpoint.format import Exchange
from accel_core.comm.control import Channel
from accel_core.comm.disagreement import listed_failures
from accel_core.comm.transport import known_to_all, ranks_know
from accel_core.errors import AccelError, CheckpointError
from accel_core.process.world import World

ADVICE = "Remove the cause and call again; what was there before is intact."
"""What to do about a failure that changed nothing."""


class Ranks:
    """The ranks that save or restore together; each of them calls every method, equally often."""

    def __init__(self, world: World, operation: str = "save_state or load_state", *, group_name: str = "") -> None:
        # Without a process group there is nobody to exchange with, whatever the environment says.
        together = dist.is_available() and dist.is_initialized()
        channel = Channel(world if together else replace(world, size=1), operation, group_name=group_name)
        self.rank, self.size = world.rank, channel.world.size
        self.exchange, self.broadcast = channel.exchange, channel.broadcast
        self.total, self.gather = channel.total, channel.gather

    @contextmanager
    def together(self, doing: str, advice: str = ADVICE) -> Iterator[Exchange]:
        """Do something on every rank, and raise on all of them if it failed on any: a CheckpointError of the same text.

        It is of the class that the lowest failing rank met, if that is one of accel's.
        """
        failure: Exception | None = None
        try:
            yield lambda value: self._outcome(doing, advice, value)
        except Exception as met:
            if ranks_know(met):
                raise
            failure = met
        self._outcome(doing, advice, None, failure)

    def _outcome(self, doing: str, advice: str, value: Any, failure: Exception | None = None) -> list[Any]:
        """Return the value of each rank in the middle of an operation, or end it; every rank calls it equally often."""
        answers = self.exchange((value, None if failure is None else described(failure)))
        failed = {rank: outcome for rank, (_, outcome) in enumerate(answers) if outcome is not None}
        if failed:
            if self.size == 1 and isinstance(failure, AccelError):
                raise failure
            kind, message = next(iter(failed.values()))
            if len(failed) == self.size and len(set(failed.values())) == 1:
                if isinstance(failure, AccelError):
                    raise known_to_all(failure)
                raise known_to_all(kind(f"{doing} failed; got {message}. {advice}")) from failure
            text = "\n".join(listed_failures({rank: message for rank, (_, message) in failed.items()}))
            raise known_to_all(kind(f"{doing} failed; got:\n{text}\n{advice}")) from failure
        return [each for each, _ in answers]


def described(failure: Exception) -> tuple[type[AccelError], str]:
    """Return the class and the text under which other ranks learn of a failure."""
    # Every rank has its class.
    if isinstance(failure, AccelError) and type(failure).__module__ == AccelError.__module__:
        return type(failure), str(failure)
    return CheckpointError, f"{type(failure).__name__}: {failure}"
