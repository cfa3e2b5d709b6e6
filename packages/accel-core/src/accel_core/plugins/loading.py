"""How data loaders are prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from accel_core._records import record
from accel_core.errors import expect_flags, expect_one_of
from accel_core.host import environ

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
        restore_position: Whether `load_state` restores the position of loaders, so that the first pass after it gives
            the rest of the epoch. Otherwise that pass gives a whole epoch, as in Accelerate, except from the loaders
            that `use_stateful_dataloader` builds; with `use_seedable_sampler`, in the order of the epoch that was
            saved. `None` uses the variable ACCEL_RESTORE_POSITION, else
            `default_restore_position`.

    Raises:
        ConfigurationError: `uneven_end` is none of the three.
        UnsupportedTypeError: A text stands where true or false belongs.

    Examples:
        >>> configuration = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        >>> accelerator = Accelerator(dataloader_config=configuration)
        >>> accelerator.split_batches
        True
    """

    default_restore_position: ClassVar[Callable[[], bool]] = staticmethod(lambda: True)
    """What `restore_position=None` means in this process where the environment does not say it; the drop-in changes it,
    as code written for Accelerate skips batches by itself."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    uneven_end: Literal["drop", "repeat", "empty"] = "drop"
    restore_position: bool | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown way of ending."""
        expect_flags(type(self), vars(self))
        expect_one_of(UNEVEN_ENDS, "uneven_end", self.uneven_end)

    @property
    def restores_position(self) -> bool:
        """Whether `load_state` restores the position of loaders: the argument, the environment, or the default."""
        if self.restore_position is not None:
            return self.restore_position
        return environ.flag("ACCEL_RESTORE_POSITION", DataLoaderConfiguration.default_restore_position())
