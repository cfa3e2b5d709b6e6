"""What the processes print: passed on as it comes, kept where asked for, and remembered for the report of a failure.

Every process gets a pipe, or a pseudo-terminal where the launcher itself writes to a terminal, in place of the
stream that is followed. One thread reads them all, and learns through the same `select` when a process ends.

A traceback is held back, with what follows it, until it is known whether its process ends by it (`traceback_hold`).
"""

import contextlib
import fcntl
import os
import pty
import selectors
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from accel_launch.supervision.logs import LogFile, LogFolder
from accel_launch.supervision.orphans import born_at
from accel_launch.supervision.traceback_hold import TRACEBACK, TracebackHold

_TAIL = 1 << 20
_CHUNK = 1 << 16


@dataclass
class RankLog:
    """What is known about the process of one rank.

    Attributes:
        rank: Rank among all processes.
        local_rank: Rank among those of this machine.
        pid: Process id, 0 before it started.
        born: When it started, as `orphans.born_at` has it.
        tail: Last MiB of its error stream (and of its output, where that is followed).
        traceback_at: When a traceback last began in it, on the monotonic clock in seconds; None without one.
        ended_at: When it ended, on the same clock; None before.
        heard_at: When it last printed something.
    """

    rank: int
    local_rank: int
    pid: int = 0
    born: str = ""
    tail: bytearray = field(default_factory=bytearray)
    traceback_at: float | None = None
    ended_at: float | None = None
    heard_at: float = field(default_factory=time.monotonic)

    def keep(self, chunk: bytes) -> None:
        """Remember a piece of what the process printed."""
        self.heard_at = time.monotonic()
        # A read may end inside the words that begin a traceback.
        seam = len(self.tail) - len(TRACEBACK)
        self.tail += chunk
        if TRACEBACK in self.tail[max(0, seam) :]:
            self.traceback_at = self.heard_at
        # Not at every piece, because each cut moves a MiB.
        if len(self.tail) > 2 * _TAIL:
            del self.tail[:-_TAIL]


@dataclass
class Followed:
    """One stream of one process that is read by the launcher."""

    log: RankLog  # the process's record
    source: int  # descriptor that is read, -1 once it has ended
    sink: int  # descriptor of the launcher that it is passed on to
    child_end: int  # descriptor for the process, closed once it has started
    child_path: str  # a path that opens the same, for those who want a file name
    file: LogFile | None = None  # copy on disk, if one is kept
    mark: bytes = b""  # text before every line, empty to pass everything on untouched
    rest: bytes = b""
    hold: TracebackHold | None = None  # what holds its tracebacks back, None where they are passed on like all else


class Streams:
    """The streams of all processes that one launcher started."""

    def __init__(self, logs: LogFolder | None = None, *, hold: bool = False) -> None:
        self.on_end: Callable[[RankLog], None] | None = None
        self._logs = logs
        self._hold = hold
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()  # interrupts `select` when a stream is added
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()  # streams are added while the thread reads
        self._stopping = False
        self._followed: list[Followed] = []
        self._thread = threading.Thread(target=self._read_all, name="accel-streams", daemon=True)
        self.ranks: dict[int, RankLog] = {}

    def add_rank(self, rank: int, local_rank: int) -> RankLog:
        """Begin the record of a rank, forgetting an earlier attempt's."""
        self.ranks[rank] = RankLog(rank, local_rank)
        return self.ranks[rank]

    def follow(self, log: RankLog, stream: str, *, mark: str = "") -> Followed:
        """Make a stream that the launcher reads."""
        sink = 1 if stream == "stdout" else 2
        if os.isatty(sink) and not mark:  # a program that writes to a terminal keeps its colors and progress bars
            source, child_end = pty.openpty()
            _like_terminal(child_end, sink)
            path = os.ttyname(child_end)
        else:
            source, child_end = os.pipe()
            # torch's agent takes file names; this one opens the existing pipe.
            path = f"/dev/fd/{child_end}"
        file = None if self._logs is None else self._logs.open(f"rank{log.rank}.{stream}.log")
        followed = Followed(log, source, sink, child_end, path, file, mark.encode())
        if self._hold and stream == "stderr":
            followed.hold = TracebackHold()
        with self._lock:
            self._followed.append(followed)
            self._selector.register(source, selectors.EVENT_READ, followed)
        self._wake()
        return followed

    def started(self, log: RankLog, pid: int) -> None:
        """Note that a rank's process runs: close the launcher's copies of its ends and listen for its end."""
        log.pid, log.born = pid, born_at(pid)
        log.heard_at = time.monotonic()
        with self._lock:
            for followed in self._followed:
                if followed.log is log and followed.child_end >= 0:
                    os.close(followed.child_end)
                    followed.child_end = -1
            # A process that was waited for already has none, and Linux before 5.3 knows none:
            # https://man7.org/linux/man-pages/man2/pidfd_open.2.html
            with contextlib.suppress(OSError):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, log)  # readable when the process ends
        if not self._thread.is_alive():
            self._thread.start()
        self._wake()

    def stop(self, *, seconds: float = 1.0) -> None:
        """Read what is left and end the thread."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(seconds)
        for followed in self._followed:
            self._drain(followed)
            self._end_line(followed)
            if followed.file is not None:
                followed.file.close()

    def collect(self, log: RankLog) -> None:
        """Hold back all that a rank prints from now on as errors."""
        for hold in self._holds_of(log):
            hold.keep_all()

    def take_held(self, log: RankLog) -> bytes:
        """Return what is held back of a rank, and drop it. Call it when the rank has ended."""
        return b"".join(hold.take() for hold in self._holds_of(log))

    def release(self, log: RankLog) -> None:
        """Pass on what is held back of a rank. Call it when the rank has ended."""
        for followed in self._of(log):
            self._release(followed)

    def _of(self, log: RankLog) -> list[Followed]:
        return [followed for followed in list(self._followed) if followed.log is log]

    def _holds_of(self, log: RankLog) -> list[TracebackHold]:
        return [followed.hold for followed in self._of(log) if followed.hold is not None]

    def _release(self, followed: Followed) -> None:
        if followed.hold is not None:
            self._write(followed, followed.hold.take())
            if followed.log.ended_at is not None:
                self._end_line(followed)

    def _write(self, followed: Followed, chunk: bytes) -> None:
        if followed.mark:
            *lines, followed.rest = (followed.rest + chunk).split(b"\n")  # ranks share a terminal: whole lines only
            chunk = b"".join(followed.mark + line + b"\n" for line in lines)
        _write_all(followed.sink, chunk)

    def _end_line(self, followed: Followed) -> None:
        if followed.rest:
            self._write(followed, b"\n")

    def _release_old(self) -> float | None:
        """Pass on tracebacks that their processes survived, and return the seconds until the next look, or None."""
        waits = []
        for followed in list(self._followed):
            if not followed.hold or followed.log.ended_at is not None:
                continue
            left = followed.hold.remaining(followed.log.pid)
            if left <= 0 or len(followed.hold) > _TAIL:  # a rank that goes on printing lives
                self._release(followed)
            else:
                waits.append(left)
        return min(waits, default=None)

    def _wake(self) -> None:
        os.write(self._wake_write, b".")

    def _read_all(self) -> None:
        while not self._stopping:
            wait = self._release_old()
            for key, _ in self._selector.select(None if wait == float("inf") else wait):
                if key.fd == self._wake_read:
                    os.read(self._wake_read, _CHUNK)
                elif isinstance(key.data, RankLog):
                    self._forget(key.fd)
                    key.data.ended_at = time.monotonic()
                    # Read first, so that what the process printed is complete when its end is reported.
                    for followed in self._of(key.data):
                        self._drain(followed)
                    if self.on_end is not None:
                        self.on_end(key.data)
                elif not self._pass_on(key.data):
                    self._forget(key.fd)
                    key.data.source = -1

    def _forget(self, descriptor: int) -> None:
        with self._lock, contextlib.suppress(KeyError):  # both threads may forget it
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _drain(self, followed: Followed) -> None:
        if followed.source < 0:
            return
        with contextlib.suppress(OSError):
            os.set_blocking(followed.source, False)
            while self._pass_on(followed):
                continue

    def _pass_on(self, followed: Followed) -> bool:
        try:
            chunk = os.read(followed.source, _CHUNK)
        except OSError:  # a terminal ends with an error, a pipe with nothing
            return False
        if not chunk:
            return False
        followed.log.keep(chunk)
        if followed.file is not None:
            followed.file.write(chunk)
        self._write(followed, chunk if followed.hold is None else followed.hold.add(chunk, followed.log.pid))
        return True


def _write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        written = _write_some(descriptor, view)
        if written is None:
            return
        view = view[written:]


def _write_some(descriptor: int, view: memoryview) -> int | None:
    try:
        return os.write(descriptor, view)
    # Any process that shares a terminal or a pipe can make it non-blocking for all, the launcher included.
    except BlockingIOError:
        time.sleep(0.005)
        return 0
    except OSError:  # nobody reads it any more, which must not end the run
        return None


def _like_terminal(descriptor: int, model: int) -> None:
    with contextlib.suppress(OSError, termios.error):  # sizes are for looks only
        size = fcntl.ioctl(model, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, size)
    attributes = termios.tcgetattr(descriptor)
    # The launcher's own terminal ends lines with a carriage return, and echoes what is typed: not twice.
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
