"""How data loaders are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_core.errors import ConfigurationError

__all__ = ["DataLoaderConfiguration"]

UNEVEN_ENDS = ("drop", "repeat", "empty")


@dataclass
class DataLoaderConfiguration:
    """How the loaders given to `prepare` are shared out over ranks.

    Args:
        split_batches: Each batch of the loader is cut into one part a rank, so that its batch size is that of the
            whole run; otherwise each rank gets batches of that size.
        dispatch_batches: The main process reads all data and sends each rank its part. `None` means so for an
            iterable dataset and not otherwise.
        even_batches: Samples from the start are repeated at the end, so that all ranks get as many of them.
        use_seedable_sampler: Shuffle by (seed, epoch) alone, so that an order can be had again.
        data_seed: Seed of that sampler; torch's own where `None`.
        non_blocking: Copy batches to the device without waiting; needs pinned memory to have an effect.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        uneven_end: What happens when the iterable streams of the ranks differ in length. "drop": all end with the
            shortest. "repeat": a rank that has run out starts its stream again until the longest ends. "empty": such
            a rank gets batches of length zero.

    Raises:
        ConfigurationError: `uneven_end` is none of the three.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    uneven_end: Literal["drop", "repeat", "empty"] = "drop"

    def __post_init__(self) -> None:
        """Refuse an unknown way of ending."""
        if self.uneven_end not in UNEVEN_ENDS:
            raise ConfigurationError(
                f"Streams of different lengths cannot end by {self.uneven_end!r}. Use one of {list(UNEVEN_ENDS)}."
            )
