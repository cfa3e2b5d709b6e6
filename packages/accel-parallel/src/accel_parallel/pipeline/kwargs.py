"""How a pipeline is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.plugins.handlers import KwargsHandler

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""The schedules, with the classes in torch.distributed.pipelining."""


@record
class PipelineKwargs(KwargsHandler):
    """How ranks along the axis "pp" share a model, with `ParallelismConfig(pp_size=…)`; without that, it does nothing.

    Args:
        schedule: In which order stages compute, by torch's names: "gpipe", "1f1b", "interleaved_1f1b",
            "interleaved_zero_bubble", "zbv_zero_bubble" or "dualpipev". All but the first two give each rank several
            stages.
        microbatches: Into how many equal parts each batch is divided; by default two for each rank along the axis.
        split: The names of the blocks with which stages begin, except the first, such as `["model.layers.12"]`. By
            default stages are cut so that the largest holds as few bytes as it can.
        loss_fn: A function of what the model returns for a micro-batch, and of a dict of what the model was called
            with, that returns the mean loss of the micro-batch. A model that returns no loss needs it.
        gather_output: Whether without gradients every rank gets all that the model returns. If false, the rank of the
            last stage does; on the others only scalars, such as the loss, are not None.

    Raises:
        ConfigurationError: An unknown schedule, or a number of micro-batches below 1.

    Examples:
        >>> settings = PipelineKwargs(schedule="gpipe", microbatches=4)
        >>> accelerator = Accelerator(kwargs_handlers=[settings])
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    split: Sequence[str] | None = None
    loss_fn: Callable[[Any, dict[str, Any]], Any] | None = None
    gather_output: bool = True

    def __post_init__(self) -> None:
        """Refuse what no pipeline can do."""
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"A pipeline runs one of the schedules {', '.join(SCHEDULES)}; got schedule={self.schedule!r}. Use one "
                "of these names."
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigurationError(
                f"A batch is divided into one micro-batch or more; got microbatches={self.microbatches}. Use a "
                "positive number."
            )
        if isinstance(self.split, str):
            raise ConfigurationError(
                f"split is a list of names of blocks; got the string {self.split!r}. Write split=[{self.split!r}]."
            )
