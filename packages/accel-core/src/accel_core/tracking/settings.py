"""How a run treats its trackers: what a failure does, where values wait, how long an end may take."""

from __future__ import annotations

import os
import tempfile
from dataclasses import field
from pathlib import Path

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.plugins.handlers import KwargsHandler

__all__ = ["POLICIES", "TrackerKwargs"]

POLICIES = ("raise", "warn", "off")
"""What a failing tracker does to a run."""


@record
class TrackerKwargs(KwargsHandler):
    """How a run treats its trackers; pass it in `kwargs_handlers`.

    Attributes:
        policy: `warn`: a tracker's error is a warning, and its values stay in the spool for `accel trackers replay`.
            `raise`: its error is raised by the next logging call, or at the end. `off`: a tracker that fails is
            switched off without a word. The default is ACCELERATE_TRACKER_POLICY, else `warn`.
        spool_dir: Folder of the spool file; by default `spool` in the logging directory, else `accel/spool` in
            XDG_STATE_HOME or `~/.local/state`.
        keep_spool: Keep the spool file of a run of which every tracker has everything, for `accel trackers show`.
        start_seconds: Longest wait for a tracker to start.
        drain_seconds: Longest wait for the trackers at the end of training, all together.

    Raises:
        ConfigurationError: The policy is unknown, or a time is negative.

    Examples:
        >>> settings = TrackerKwargs(policy="raise", drain_seconds=60.0)
        >>> accelerator = Accelerator(project_dir="run", kwargs_handlers=[settings])
    """

    policy: str = field(default_factory=lambda: environ.choice("ACCELERATE_TRACKER_POLICY", POLICIES, "warn"))
    spool_dir: str | os.PathLike[str] | None = None
    keep_spool: bool = field(default_factory=lambda: environ.flag("ACCELERATE_TRACKER_KEEP_SPOOL"))
    start_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigurationError(
                f"The policy for failing trackers is unknown; got {self.policy!r}. Use one of {', '.join(POLICIES)}."
            )
        for name in ("start_seconds", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is a time in seconds; got {getattr(self, name)!r}. Use zero or more.")

    def spool_folder(self, logging_dir: str | os.PathLike[str] | None) -> Path:
        """Return the folder of spool files for a run that logs to `logging_dir`.

        Args:
            logging_dir: The run's logging directory, if it has one.

        Returns:
            The folder, which need not exist yet.
        """
        if self.spool_dir is not None:
            return Path(self.spool_dir)
        if logging_dir is not None:
            return Path(logging_dir) / "spool"
        states = Path(os.path.expanduser(environ.text("XDG_STATE_HOME") or "~/.local/state"))
        if states.is_absolute():
            return states / "accel" / "spool"
        # In a folder that all users share, each has one of their own.
        return Path(tempfile.gettempdir()) / f"accel-{os.getuid() if hasattr(os, 'getuid') else 'spool'}" / "spool"
