"""Which trackers there are: found by entry point, ours and third parties' alike."""

from __future__ import annotations

import functools
import os
from collections import UserDict
from collections.abc import Iterable, MutableMapping
from typing import Any

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.host.installed import points_of
from accel_core.logging import get_logger
from accel_core.options.engines import load
from accel_core.options.enums import LoggerType, meant
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

logger = get_logger(__name__)

ENTRY_POINT_GROUP = "accel.trackers"
"""Entry-point group in which a distribution offers tracker classes by name."""

_SIBLING = "accel-trackers"

Wanted = str | LoggerType | GeneralTracker


class _TrackerClasses(UserDict[str, type[GeneralTracker]]):
    """The classes of trackers by name, imported when asked for."""

    def __init__(self) -> None:
        """Know nothing yet: looking for packages reads many files."""

    @functools.cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(points_of(ENTRY_POINT_GROUP))

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        if isinstance(self.data[name], str):
            self.data[name] = load(self.data[name])
        return super().__getitem__(name)


LOGGER_TYPE_TO_CLASS: MutableMapping[str, type[GeneralTracker]] = _TrackerClasses()
"""Every known tracker class by its name."""


def is_available(name: str) -> bool:
    """Return whether a tracker is known and its library is installed."""
    return name in LOGGER_TYPE_TO_CLASS and _missing_library(LOGGER_TYPE_TO_CLASS[name]) is None


def get_available_trackers() -> list[Any]:
    """Return the trackers that can be used here: `LoggerType` members, and names of registered ones.

    Examples:
        >>> get_available_trackers()  # what log_with="all" starts
        [...]
    """
    found = (name for name in LOGGER_TYPE_TO_CLASS if is_available(name))
    return [LoggerType(name) if name in LoggerType else name for name in found]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker usable by its name in `log_with`, in this process.

    It takes the place of one of the same name. A distribution offers its tracker without a call, through the
    entry-point group `accel.trackers`.

    Args:
        tracker_class: A subclass of `GeneralTracker` with a `name` and `requires_logging_directory`.

    Examples:
        >>> from accel import GeneralTracker
        >>> class Silent(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "silent", False, None
        >>> register_tracker_class(Silent)
        >>> accelerator = Accelerator(log_with="silent")
    """
    LOGGER_TYPE_TO_CLASS[str(tracker_class.name)] = tracker_class


def filter_trackers(
    log_with: Wanted | Iterable[Wanted] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Any]:
    """Check what a user asks to log with.

    Raises:
        ConfigurationError: A name is unknown, or a tracker needs a folder and none is given.
        MissingDependencyError: A tracker's library is not installed, and that raises in this process.
    """
    if log_with is None:
        return []
    wanted: list[Any] = [log_with]
    if isinstance(log_with, Iterable) and not isinstance(log_with, str | LoggerType | GeneralTracker):
        wanted = list(log_with)
    chosen: list[Any] = []
    for item in wanted:
        if isinstance(item, GeneralTracker):
            chosen += [] if any(item is known for known in chosen) else [item]
            continue
        name = str(item.value) if isinstance(item, LoggerType) else item
        if name == LoggerType.ALL.value:
            usable = [name for name in LOGGER_TYPE_TO_CLASS if is_available(name)]
            names = [name for name in usable if logging_dir is not None or not _needs_folder(name)]
        else:
            names = _checked(name, logging_dir)
        found = [LoggerType(name) if name in LoggerType else name for name in names]
        chosen += [item for item in found if item not in chosen]
    return chosen


def _checked(name: object, logging_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the name of a tracker that was asked for, or nothing where the run does without it."""
    if not isinstance(name, str) or name not in LOGGER_TYPE_TO_CLASS:
        raise _unknown(name)
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    library = _missing_library(tracker_class)
    if library is not None:
        ours = tracker_class.__module__.startswith("accel_trackers.")
        problem = (
            f"The tracker {name!r} needs a library that is not installed; looked for "
            f"{' or '.join(tracker_class.libraries)}."
        )
        install = f'pip install "{_SIBLING}[{name}]"' if ours else f"pip install {library}"
        if TrackerKwargs.missing_library == "raise":
            raise MissingDependencyError(f"{problem} Install it: {install}")
        logger.warning_once(f"{problem} The run continues without this tracker. Install it: {install}")
        return []
    if logging_dir is None and _needs_folder(name):
        raise ConfigurationError(
            f"The tracker {name!r} writes to a folder and none is known; logging_dir is None. Pass "
            "project_dir=... or project_config=ProjectConfiguration(logging_dir=...) to the Accelerator."
        )
    return [name]


def _unknown(name: object) -> ConfigurationError:
    known = sorted({"all", *LOGGER_TYPE_TO_CLASS})
    hint = meant(name, known) or " Use one of them, register a class with register_tracker_class, or pass an object."
    if isinstance(name, str) and name in LoggerType:
        hint = f' It comes with {_SIBLING}; install it: pip install "{_SIBLING}[{name}]"'
    return ConfigurationError(f"No tracker is named {name!r}; known are {', '.join(known)}.{hint}")


def _needs_folder(name: str) -> bool:
    return bool(getattr(LOGGER_TYPE_TO_CLASS[name], "requires_logging_directory", False))


def _missing_library(tracker_class: type[GeneralTracker]) -> str | None:
    """Return the library to install, or `None` where one of those that serve is here."""
    if not tracker_class.libraries or any(map(has_module, tracker_class.libraries)):
        return None
    return tracker_class.libraries[0]
