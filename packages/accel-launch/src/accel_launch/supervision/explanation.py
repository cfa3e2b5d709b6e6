"""What a person needs of a traceback: the frames of the script, and what mends a failure that is often met."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from accel_launch.supervision.outcome import ExitOutcome, cause_of

_FRAME = re.compile(r'^(?P<mark>\[rank\d+\]: ?)?  File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$')
_SOURCE = re.compile(r"^(\[rank\d+\]: ?)?    ")
_PACKAGE = re.compile(r".*(?:site-packages|dist-packages|src|python3\.\d+)/(\w+)")
_LOST = re.compile(r"Connection (?:closed|reset) by peer|GLHF|ncclRemoteError|Socket Timeout|Timed out waiting")
_CURES = {
    r"'DistributedDataParallel' object has no attribute '(\w+)'": (
        "The prepared model is wrapped for several processes: call `accelerator.unwrap_model(model).{}`."
    ),
    r"Expected to have finished reduction in the (prior) iteration": (
        "Parameters had no part in the loss: make the Accelerator with "
        "`kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]`."
    ),
}
"""What torch says of a mistake that is often made, and what mends it."""


def _is_own(file: str, folder: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(f"{os.path.realpath(folder)}{os.sep}") and "-packages/" not in path


def _package(file: str) -> str:
    found = _PACKAGE.match(file)
    return found[1] if found else Path(file).parent.name or "Python"


def fold(traceback: str, folder: str) -> str:
    """Return a traceback whose frames outside of a folder are counted, in one line for those that follow each other."""
    lines: list[str] = []
    outside: list[re.Match[str]] = []
    hides = False
    for line in traceback.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            hides = not _is_own(frame["file"], folder)
        elif not _SOURCE.match(line):
            hides = False
        if frame is not None and hides:
            outside.append(frame)
        if not hides:
            lines += _counted(outside)
            outside = []
            lines.append(line)
    return "\n".join(lines) if any(map(_FRAME.match, lines)) else traceback


def _counted(frames: Sequence[re.Match[str]]) -> list[str]:
    if not frames:
        return []
    names = ", ".join(dict.fromkeys(_package(frame["file"]) for frame in frames))
    return [f"{frames[0]['mark'] or ''}  … {len(frames)} frame{'s' * (len(frames) > 1)} in {names}"]


def cure_of(traceback: str) -> str:
    """Return in one line what mends a failure, or nothing where that is not known."""
    for pattern, cure in _CURES.items():
        found = re.search(pattern, traceback)
        if found:
            return cure.format(found[1])
    return ""


def left_early(outcomes: Sequence[ExitOutcome], folder: str) -> str:
    """Return which rank ended while another waited for it, and where that one was; nothing where none did."""
    cause = cause_of(outcomes)
    ended = next((outcome.rank for outcome in outcomes if outcome.status == 0), None)
    if cause is None or ended is None or not _LOST.search(cause.traceback):
        return ""
    frames = [frame for frame in map(_FRAME.match, cause.traceback.splitlines()) if frame]
    own = [place for place, frame in enumerate(frames) if _is_own(frame["file"], folder)]
    if not own:
        return ""
    last, callee = frames[own[-1]], frames[own[-1] + 1 :]
    doing = f"in {callee[0]['name']} at" if callee else "at"
    where = f"{Path(last['file']).name}:{last['line']}"
    return f"Rank {ended} ended (exit 0) while rank {cause.rank} was {doing} {where}; did it leave the loop early?"
