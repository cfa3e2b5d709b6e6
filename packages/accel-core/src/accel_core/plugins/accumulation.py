"""How gradients are accumulated over several batches."""

from __future__ import annotations

from dataclasses import field
from numbers import Integral
from typing import ClassVar, Literal, get_args

from accel_core._records import record
from accel_core.errors import ConfigurationError, expect_one_of
from accel_core.plugins.handlers import KwargsHandler

ShortWindow = Literal["actual", "full"]
"""What the losses are divided by in a window that the end of the data cuts short."""


@record
class GradientAccumulationPlugin(KwargsHandler):
    """When the optimizer steps while gradients are accumulated.

    Args:
        num_steps: Number of batches whose gradients are added up before the optimizer steps.
        adjust_scheduler: Has no effect, as in Accelerate 1.15.0: a schedule moves when the optimizer steps.
        sync_with_dataloader: Whether the last batch of a loader ends the window, however short it is.
        sync_each_batch: Whether ranks exchange gradients at every batch: more traffic, less memory.
        short_window: What the losses are divided by in a window that the end of the data cuts short: "actual", its real
            number of batches, or "full", `num_steps` as everywhere. `None` uses `default_short_window`.

    Raises:
        ConfigurationError: `num_steps` is not a whole number of at least 1, or `short_window` is unknown.

    Examples:
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        >>> accelerator.gradient_accumulation_steps
        4
    """

    default_short_window: ClassVar[ShortWindow] = "actual"
    """What `short_window=None` means in this process, read at every step; the drop-in sets "full", as code written for
    Accelerate relies on it."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    short_window: ShortWindow | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a window that never ends, and an unknown divisor."""
        if self.num_steps is not None and (not isinstance(self.num_steps, Integral) or self.num_steps < 1):
            raise ConfigurationError(
                f"Gradients are accumulated over a whole number of batches; got num_steps={self.num_steps!r}. "
                "Use 1 or more."
            )
        super().__post_init__()
        expect_one_of((None, *get_args(ShortWindow)), "short_window", self.short_window)
