"""How gradients are accumulated over several batches."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from accel_core.errors import ConfigurationError
from accel_core.plugins.handlers import KwargsHandler

__all__ = ["GradientAccumulationPlugin"]


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """When the optimizer steps while gradients are accumulated.

    Args:
        num_steps: Number of batches whose gradients are added up before the optimizer steps.
        adjust_scheduler: Whether the schedule moves once a batch, also while gradients are only added up.
        sync_with_dataloader: Whether the last batch of a loader ends the window, however short it is.
        sync_each_batch: Whether ranks exchange gradients at every batch: more traffic, less memory.

    Raises:
        ConfigurationError: `num_steps` is not a whole number of at least 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        """Refuse a window that never ends."""
        if self.num_steps is not None and (not isinstance(self.num_steps, Integral) or self.num_steps < 1):
            raise ConfigurationError(
                f"Gradients are accumulated over a whole number of batches; got num_steps={self.num_steps!r}. "
                "Use 1 or more."
            )
