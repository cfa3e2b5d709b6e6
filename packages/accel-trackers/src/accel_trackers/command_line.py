"""What `accel trackers` does."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, TrackerError
from accel_trackers.curves import RecordedCurves, read_runs
from accel_trackers.plot import draw, printable
from accel_trackers.replay import replay

__all__ = ["run"]

_MARKS = "•+xo*#@%"


def run(arguments: argparse.Namespace) -> int:
    """Run `show` or `replay`.

    Raises:
        ConfigurationError: A name or number is not valid.
        TrackerError: The file or folder does not exist.
    """
    return _show(arguments) if arguments.verb == "show" else _replay(arguments)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _show(arguments: argparse.Namespace) -> int:
    if min(arguments.last, arguments.width, arguments.height) < 1:
        raise ConfigurationError(
            f"A plot needs runs, columns and rows; got --last {arguments.last} --width {arguments.width} --height "
            f"{arguments.height}. Use numbers of 1 or more."
        )
    place = _existing(arguments.folder)
    found_runs, refused = read_runs(place)
    for reason in refused:
        sys.stderr.write(f"{printable(reason)}\n")
    runs = found_runs[-arguments.last :]
    names = list(dict.fromkeys(name for found in runs for name in found.curves))
    if arguments.name:
        unknown = sorted(set(arguments.name) - set(names))
        if unknown:
            raise ConfigurationError(
                f"No run below {place} logged {', '.join(unknown)}; there are {', '.join(names) or 'no values'}. "
                "Choose among them with --name."
            )
        names = arguments.name
    if not names:
        raise ConfigurationError(
            f"There is nothing to draw below {place}: no spool file and no event file with numbers. Name the logging "
            "directory, or keep the spool with TrackerKwargs(keep_spool=True)."
        )
    for mark, found in zip(_MARKS, runs, strict=False):
        _say(f"{mark} {printable(found.label)}")
    for name in names:
        _say("")
        _say(_plot(name, runs, arguments.width, arguments.height))
    return 0


def _plot(name: str, runs: list[RecordedCurves], width: int, height: int) -> str:
    curves = {mark: found.curves[name] for mark, found in zip(_MARKS, runs, strict=False) if name in found.curves}
    return draw(printable(name), curves, width=width, height=height)


def _replay(arguments: argparse.Namespace) -> int:
    place = _existing(arguments.path)
    try:
        init: Any = json.loads(arguments.init)
        if not isinstance(init, dict):
            raise ValueError("it is not a mapping")
    except (RecursionError, ValueError) as error:
        raise ConfigurationError(
            f'--init is not JSON ({error}); got {arguments.init!r}. Write for example \'{{"entity": "me"}}\'.'
        ) from None
    outcomes = replay(
        place,
        trackers=arguments.tracker,
        to=arguments.to,
        logging_dir=arguments.logging_dir,
        init=init,
        keep=arguments.keep,
    )
    for outcome in outcomes:
        _say(str(outcome))
    if not outcomes:
        _say(f"nothing to send below {place}")
    return int(any(outcome.error is not None for outcome in outcomes))


def _existing(path: str) -> Path:
    place = Path(path)
    try:
        place.stat()
    except OSError as error:
        raise TrackerError(
            f"There is no file or folder {place}; the system says {error.strerror or error}. Name a logging directory "
            "or a spool."
        ) from error
    return place
