"""Ending in good order when the machine is taken away.

Examples:
    >>> from accel import preemption
    >>> preemption.watch()
    >>> for images, labels in loader:
    ...     if preemption.requested():  # the same answer on every process
    ...         accelerator.save_state("state")
    ...         preemption.leave()
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from accel_core.checkpoint import background
from accel_core.comm.control import Channel
from accel_core.process.world import current

EXIT_CODE = 75
"""What `leave` exits with: `EX_TEMPFAIL` of sysexits.h, "try again later"."""

# No Event: setting one takes a lock, for which a second signal inside of the first one's handler would wait forever.
# SLURM and the launcher both send a rank its signal, one right after the other.
_received: set[int] = set()
_before: dict[int, object] = {}


def watch(signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
    """Let signals set a flag instead of ending the process. Calling it again changes nothing.

    Raises:
        ValueError: Called outside the main thread.
    """
    for number in signals:
        if number not in _before:
            _before[number] = signal.signal(number, _note)


def unwatch() -> None:
    """Give the signals back to whoever had them before `watch`, and clear the flag."""
    for number, handler in _before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _before.clear()
    _received.clear()


def requested() -> bool:
    """Return whether any rank was asked to end; every rank calls it at the same step and gets the same answer."""
    world = current()
    if world is None or world.size == 1 or not dist.is_initialized():
        return bool(_received)
    # Over a group on the host: to read the answer off a device would wait for the step that it computes.
    group_name = "" if world.device.type == "cpu" else "preemption"
    return Channel(world, "preemption.requested", group_name=group_name).any(bool(_received))


def leave(code: int = EXIT_CODE) -> NoReturn:
    """Wait for a save that is under way, then exit with a code that the launcher reports.

    From here on the watched signals are ignored: a launcher that sees one rank leave tells the others to end, and they
    are to leave with the same code.

    Raises:
        CheckpointError: The save that was under way failed.
        SystemExit: Always otherwise.
    """
    background.finish()
    for number in _before:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _note(number: int, frame: FrameType | None) -> None:
    _received.add(number)
