"""Which positions of a sequence each rank has: one piece of its head, and the mirrored one of its tail.

Under a causal mask a query late in the sequence attends to many keys and an early one to few. Of twice as many pieces
as ranks, rank r has number r and number r from the end, so that all have as much to do. This is the order of torch's
`context_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel_core._records import record
from accel_core.errors import ConfigurationError


@record(frozen=True)
class Share:
    """One rank's part of a sequence."""

    length: int  # length of the whole sequence, in tokens
    rank: int  # the rank, within its context-parallel group
    size: int  # number of ranks in the group

    def check(self) -> None:
        """Refuse a length that ranks cannot share evenly."""
        if self.length % (2 * self.size) or not self.length:  # a head and a tail piece for each
            raise ConfigurationError(
                f"Context parallel over {self.size} ranks takes sequences whose length is divisible by "
                f"{2 * self.size} (a head and a tail piece for each); got a length of {self.length}. "
                "Pad the batch to a multiple of that."
            )

    @property
    def local_length(self) -> int:
        """Length of this rank's part."""
        return self.length // self.size

    @property
    def pieces(self) -> tuple[slice, slice]:
        """The positions of this rank: its piece of the head and its piece of the tail."""
        piece = self.length // (2 * self.size)
        last = 2 * self.size - 1 - self.rank
        return slice(self.rank * piece, (self.rank + 1) * piece), slice(last * piece, (last + 1) * piece)

    def of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor, in memory of its own."""
        return torch.cat([whole.narrow(dim, piece.start, piece.stop - piece.start) for piece in self.pieces], dim)


def in_order(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Put the parts of all ranks together again, in the order of the sequence."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim)
