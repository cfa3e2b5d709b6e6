"""How a run treats its trackers: what a failure does, how long a start and an end may take."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

from accel_core._records import record
from accel_core.errors import expect_one_of
from accel_core.host import environ
from accel_core.plugins.handlers import KwargsHandler

POLICIES = ("raise", "warn", "off")
"""What a failing tracker does to a run."""


@record
class TrackerKwargs(KwargsHandler):
    """How a run treats its trackers; pass it in `kwargs_handlers`.

    Attributes:
        policy: `warn`: a tracker's first error is a warning, and what it does not take is written to a file of JSON
            lines in the logging directory. `raise`: its error is raised by the next logging call, or at the end. `off`:
            a tracker that fails is switched off without a word. The default is ACCELERATE_TRACKER_POLICY, else `warn`.
        start_seconds: Longest wait for a tracker to start.
        drain_seconds: Longest wait for the trackers at the end of training, all together; what they have not taken by
            then is written to that file.

    Raises:
        ConfigurationError: The policy is unknown.

    Examples:
        >>> settings = TrackerKwargs(policy="raise", drain_seconds=60.0)
        >>> accelerator = Accelerator(project_dir="run", kwargs_handlers=[settings])
    """

    missing_library: ClassVar[Literal["raise", "warn"]] = "raise"
    """What asking for a tracker does in this process whose library is not installed: an error, or one warning and a run
    without it; the drop-in sets "warn", as scripts name trackers that are not on every machine."""

    policy: str = field(default_factory=lambda: environ.choice("ACCELERATE_TRACKER_POLICY", POLICIES, "warn"))
    start_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        expect_one_of(POLICIES, "policy", self.policy)
