"""The operating system's kernel."""

from __future__ import annotations

import logging
import platform

from packaging.version import InvalidVersion, Version

_OLDEST = Version("5.5")
_logger = logging.getLogger(__name__)


def check_os_kernel() -> None:
    """Warn where the Linux kernel is older than 5.5: with several processes it can make a run hang."""
    system, _, release, *_ = platform.uname()
    if system != "Linux":
        return
    number = release.split("-")[0].split("+")[0]  # distributions put words of their own after it
    try:
        version = Version(number)
    except InvalidVersion:  # a warning is not worth an error
        return
    if version < _OLDEST:
        _logger.warning("Linux kernel %s is older than %s, with which runs can hang. Update it.", version, _OLDEST)
