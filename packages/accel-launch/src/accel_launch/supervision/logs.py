"""The folder with what every rank printed: files of earlier runs are kept, and a full disk does not stop the run."""

import contextlib
import itertools
from io import FileIO
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.terminal import say

RECORD = "failure.json"
"""Name of the record of a failure in the folder."""


class LogFile:
    """The output of one rank on disk. It never raises: what cannot be written is left out, and that is said once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._warned = False

    def write(self, chunk: bytes) -> None:
        """Append a piece."""
        view = memoryview(chunk)
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                say(
                    f"accel launch: a log cannot be written; {self._path} gives: {error.strerror}. The run goes on; "
                    "what is printed is shown, but missing in that file. Make room on the disk."
                )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # an error that a network disk reports late; the run is over
                self._file.close()


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
