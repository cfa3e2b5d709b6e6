"""No process outlives its run: whatever ends the launcher, even SIGKILL, its processes end too.

The reaper is a forked process that holds the reading end of a pipe and the list of processes. When the launcher ends,
the kernel closes the pipe and the reaper ends every process that is still there. Processes are known by the group that
they lead and by a variable in their environment, which children of children inherit. A process that empties its
environment and opens a session of its own carries neither sign: it is not found, and is left behind.
"""

import contextlib
import os
import select
import signal
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from accel_core.host import environ

RUN_VARIABLE = "ACCEL_RUN_ID"
"""Variable that marks every process of one run: its id, after those of the runs that it was started in."""


class RunMark:
    """The mark of every process of one run, by which those that outlive it are found."""

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex

    def variables(self) -> dict[str, str]:
        """Return the variable for processes of the run: its id, after those of the runs around it."""
        around = environ.text(RUN_VARIABLE)
        return {RUN_VARIABLE: f"{around} {self.run_id}" if around else self.run_id}

    def end_orphans(self) -> list[int]:
        """End the processes that outlived those that started them, and return their numbers."""
        return kill_orphans(self.run_id)


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return _stat(pid, 0) not in ("", "Z", "X")


def born_at(pid: int) -> str:
    """Return when a process began, which no later process with its number shares; an empty text if there is none."""
    return _stat(pid, 19)


def _stat(pid: int, field: int) -> str:
    """Return what /proc says of a process, by place after its name; an empty text where it says nothing."""
    # https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    with contextlib.suppress(OSError, IndexError):
        # The program's name stands in parentheses, and may hold any character.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[field]
    return ""


def find_orphans(run_id: str) -> list[int]:
    """Return the processes of a run that are still there, by the variable in their environment."""
    name, wanted = f"{RUN_VARIABLE}=".encode(), run_id.encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or of another user
            continue
        marks = [variable[len(name) :].split() for variable in variables if variable.startswith(name)]
        if any(wanted in mark for mark in marks) and alive(int(folder.name)):
            found.append(int(folder.name))
    return found


def signal_group(pid: int, number: signal.Signals, born: str = "") -> None:
    """Send a signal to the group that a process leads, or to the process if it leads none yet.

    A process gets it once: a second SIGABRT would end it in the middle of printing its stacks. With `born` another
    process, to which the system gave the number when the last one of the group had ended, gets none.
    """
    if born and born_at(pid) not in ("", born):
        return
    for send in (os.killpg, os.kill):  # a process that was just started leads no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return


def kill_orphans(run_id: str, *, grace: float = 2.0) -> list[int]:
    """End what is left of a run: SIGTERM first, SIGKILL after a grace period."""
    left = find_orphans(run_id)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if _all_end(left, grace):
            break
    return left


def _all_end(pids: Iterable[int], seconds: float) -> bool:
    pids, deadline = list(pids), time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


class OrphanReaper:
    """The forked process that ends the processes of one run when the launcher is gone, seen from the launcher.

    Start it before threads and before heavy imports: it is a fork of the launcher.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        read_end, self._pipe = os.pipe()
        # A rank that had the writing end would keep the pipe open after the launcher is gone.
        os.set_inheritable(self._pipe, False)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                # With a writing end of its own, the reaper would never read the end of the pipe.
                os.close(self._pipe)
                _wait_for_launcher(read_end, run_id)
            finally:
                # Not `sys.exit`: handlers and buffered output that it would run and print are the launcher's.
                os._exit(0)
        os.close(read_end)

    def watch(self, pid: int) -> None:
        """Add a process, the leader of its own group, to those that must not outlive the launcher."""
        os.write(self._pipe, f"{pid} {born_at(pid)}\n".encode())

    def release(self) -> None:
        """End the reaper: the launcher has seen to its processes itself."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"done\n")
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):  # somebody may have waited for all children
            os.waitpid(self._pid, os.WNOHANG)


def _wait_for_launcher(pipe: int, run_id: str) -> None:
    # A terminal sends Ctrl-C to the launcher's whole group, and the reaper has to outlive the launcher.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _close_files(keep=pipe)
    received = b""
    while True:
        select.select([pipe], [], [])
        chunk = os.read(pipe, 4096)
        if not chunk:
            break
        received += chunk  # processes, until the pipe ends
    lines = received.decode().splitlines()
    if "done" in lines:
        return
    watched = {int(pid): born for pid, _, born in (line.partition(" ") for line in lines)}
    for number, grace in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
        for pid, born in watched.items():
            signal_group(pid, number, born)
        _all_end((pid for pid, born in watched.items() if born_at(pid) == born), grace)
    kill_orphans(run_id)  # what started a session of its own


def _close_files(keep: int) -> None:
    # A reader of the launcher's output through a pipe waits until every holder has closed the other end.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != keep:
            with contextlib.suppress(OSError):
                os.close(number)
