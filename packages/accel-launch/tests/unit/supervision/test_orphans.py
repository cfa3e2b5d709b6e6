"""Signals to a process and to the group that it leads."""

import signal
import subprocess
import sys

import pytest

from accel_launch.supervision.orphans import signal_group

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
