"""How a run with replicas deals with those that die and come."""

from __future__ import annotations

from typing import ClassVar

from accel_core._records import record
from accel_core.plugins.handlers import KwargsHandler


@record
class FaultToleranceKwargs(KwargsHandler):
    """How a run of `accel launch --replicas` deals with replicas that die and come; without that, it does nothing.

    Args:
        min_replicas: With fewer replicas no step is made; `None` takes `--min-replicas`.
        quorum_timeout: Seconds for which a replica waits until so many are there. Then the state is saved, where the
            project names its checkpoints itself, and the script ends with the code 75.
        heal: Whether a replica that died comes back, and takes over the state of a living one. If false, it stays away.
        timeout: Seconds that replicas wait for each other in the exchange of a step, and for the state of another one.
            A step that takes longer on one of them than on the others, by so much, is not made.

    Examples:
        >>> settings = FaultToleranceKwargs(min_replicas=2, quorum_timeout=300)
        >>> accelerator = Accelerator(kwargs_handlers=[settings])
        >>> accelerator.replicas is None  # started without --replicas
        True
    """

    extension: ClassVar[str] = "replicas"

    min_replicas: int | None = None
    quorum_timeout: float = 60.0
    heal: bool = True
    timeout: float = 30.0
