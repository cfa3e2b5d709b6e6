"""The folder with what every rank printed: files of earlier runs are kept, and a full disk does not stop the run."""

import contextlib
import itertools
import os
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.terminal import say

__all__ = ["RECORD", "LogFile", "LogFolder"]

RECORD = "failure.json"
"""Name of the record of a failure in the folder."""


class LogFile:
    """The output of one rank on disk. It never raises: what cannot be written is left out, with a note in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._missing = 0
        self._warned = False

    def write(self, chunk: bytes) -> None:
        """Append a piece, or count it as missing if it cannot be written."""
        view = memoryview(chunk)
        try:
            self._open()
            if self._missing:
                gap = f"\n[accel launch: {self._missing} bytes are missing here]\n".encode()
                if os.write(self._descriptor, gap) == len(gap):  # a part of the note may fill the disk again
                    self._missing = 0
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._missing += len(view)
            self._warn(error)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # an error that a network disk reports late; the run is over
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            say(
                f"accel launch: a log cannot be written; {self._path} gives: {error.strerror}. The run goes on; "
                "what is printed is shown, but missing in that file. Make room on the disk."
            )


class LogFolder:
    """The folder of `--log-dir`, used by one run after the other.

    Raises:
        ConfigurationError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun: set[str] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _keep_apart(path / RECORD)
        except OSError as error:
            raise ConfigurationError(
                f"The log folder cannot be used; {str(path)!r} gives: {error.strerror}. Name another with --log-dir."
            ) from None

    def open(self, name: str) -> LogFile:
        """Return the log of one stream; attempts of one run share it."""
        if name not in self._begun:
            self._begun.add(name)
            with contextlib.suppress(OSError):  # the disk cannot rename: append to the log instead
                _keep_apart(self.path / name)
        log = LogFile(self.path / name)
        log.write(b"")  # makes the file, even for a rank that prints nothing
        return log


def _keep_apart(path: Path) -> None:
    """Rename the file of an earlier run to the first free `stem.N.suffix`; other ranks' files are left alone."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    for number in itertools.count(1):
        target = path.with_suffix(f".{number}{path.suffix}")
        if not target.exists():
            with contextlib.suppress(FileNotFoundError):  # another machine renamed the common record first
                path.rename(target)
            return
