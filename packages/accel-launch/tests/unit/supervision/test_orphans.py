"""Signals to a process and to the group that it leads."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_launch.supervision.orphans import signal_group
from accel_testing import limits

# A real-time signal is queued: one that is sent twice is counted twice.
COUNT = """
import signal
number = {signal.SIGRTMIN}
signal.pthread_sigmask(signal.SIG_BLOCK, number)
print("ready", flush=True)
count = 0
while signal.sigtimedwait(number, 0.5 if count else 20):
    count += 1
print(count)
"""


@pytest.mark.parametrize("leads", [True, False])
def test_a_signal_comes_once(leads: bool) -> None:
    """A process that leads a group gets the signal once, and so does one that leads none."""
    words = [sys.executable, "-c", COUNT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=leads) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        signal_group(process.pid, signal.SIGRTMIN)
        assert process.stdout.read() == "1\n"


def test_a_process_that_is_gone_is_no_error() -> None:
    """A group and a process that have ended are passed over."""
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        process.wait()
    signal_group(process.pid, signal.SIGTERM)


# Ends a process of a run, lets a stranger have its number, and then ends the run.
REUSE = """
import os, subprocess, sys
from pathlib import Path
from accel_launch.supervision.orphans import OrphanReaper
from accel_launch.supervision.supervisor import Supervisor

def stranger(number):
    for _ in range(1000):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
        process = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        if process.pid == number:
            return process
        process.kill()
        process.wait()

settings = dict(log_dir=None, quiet=True, watchdog=None, tee="0", role="default")
if sys.argv[1] == "launcher":
    with Supervisor(settings, []) as supervisor:
        supervisor.follow(0, 0)
        process = subprocess.Popen(["sleep", "0.1"], start_new_session=True)
        supervisor.started(0, process.pid)
        process.wait()
        other = stranger(process.pid)
else:
    reaper = OrphanReaper("none")
    process = subprocess.Popen(["sleep", "0.1"], start_new_session=True)
    reaper.watch(process.pid)
    process.wait()
    other = stranger(process.pid)
    os.close(reaper._pipe)  # as where the launcher is killed
    os.waitpid(reaper._pid, 0)
assert other is not None
print("spared" if other.poll() is None else "ended")
other.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["launcher", "reaper"])
def test_who_takes_the_number_of_an_ended_process_is_spared(ends: str) -> None:
    """A run ends what its processes left in their groups, and not a process that has one of their numbers by now."""
    number = Path("/proc/sys/kernel/ns_last_pid")
    try:
        number.write_text(number.read_text())
    except OSError as error:
        pytest.skip(f"numbers of processes cannot be chosen here: {error}")
    done = limits.run([sys.executable, "-c", REUSE, ends], quiet=10)
    assert done.stdout == "spared\n", done.stderr
