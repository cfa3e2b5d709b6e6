"""How a run with replicas deals with those that die and come."""

from __future__ import annotations

from typing import ClassVar

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.plugins.handlers import KwargsHandler

__all__ = ["FaultToleranceKwargs"]


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

    Raises:
        ConfigurationError: A value that cannot be.

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

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        fewest = self.min_replicas
        if fewest is not None and (isinstance(fewest, bool) or not isinstance(fewest, int) or fewest < 1):
            raise ConfigurationError(f"A step needs 1 replica or more; got min_replicas={fewest!r}. Write 1.")
        for name in ("quorum_timeout", "timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigurationError(f"{name} is a number of seconds above 0; got {value!r}. Write {name}=60.")
