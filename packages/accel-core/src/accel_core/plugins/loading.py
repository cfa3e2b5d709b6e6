"""How data loaders are prepared."""

from __future__ import annotations

from typing import Literal

from accel_core._records import record
from accel_core.errors import ConfigurationError

__all__ = ["UNEVEN_ENDS", "DataLoaderConfiguration"]

UNEVEN_ENDS = ("drop", "repeat", "empty")


@record
class DataLoaderConfiguration:
    """How the loaders given to `prepare` are divided among the ranks.

    Args:
        split_batches: Divide each batch of the loader among the ranks, so that its batch size is the global one.
            Otherwise each rank gets batches of that size.
        dispatch_batches: The main process reads all data and sends each rank its part. `None` does so for an iterable
            dataset only.
        even_batches: Repeat samples from the start at the end, so that all ranks get the same number of them.
        use_seedable_sampler: Shuffle by seed and epoch alone, so that an order can be reproduced.
        data_seed: Seed of that sampler; torch's own where `None`.
        non_blocking: Copy batches to the device without waiting; needs pinned memory to have an effect.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        uneven_end: What happens when the iterable streams of the ranks differ in length. "drop": all end with the
            shortest. "repeat": a rank that has run out repeats its first batch until the longest ends, or one of
            another rank where it had none; `gather_for_metrics` leaves repeats out. "empty": such a rank gets batches
            of length zero.

    Raises:
        ConfigurationError: `uneven_end` is none of the three.

    Examples:
        >>> configuration = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        >>> accelerator = Accelerator(dataloader_config=configuration)
        >>> accelerator.split_batches
        True
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
                f"uneven_end is not one of its choices; got {self.uneven_end!r}. Use one of {list(UNEVEN_ENDS)}."
            )
