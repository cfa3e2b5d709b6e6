"""Signals that ask a run to end."""

import os
import signal
import sys

import pytest

from accel_core.checkpoint import preemption
from accel_testing import limits

SIGNALED = """
import signal, sys
from accel_core.checkpoint import preemption

def again(frame, event, argument):
    while frame is not None and frame.f_code is not preemption._note.__code__:
        frame = frame.f_back
    if frame is not None:
        print(event)
        signal.raise_signal(signal.SIGUSR1)

preemption.watch()
sys.setprofile(again)
signal.raise_signal(signal.SIGTERM)
sys.setprofile(None)
assert preemption.requested()
"""


def test_signals_set_a_flag_and_are_given_back() -> None:
    """SIGTERM and SIGUSR1 do not end a watching process; afterwards the earlier handler works again."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *call: seen.append(call[0]))
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            preemption.watch()
            preemption.watch()
            assert not preemption.requested()
            os.kill(os.getpid(), number)
            assert preemption.requested()
            preemption.unwatch()
            assert not preemption.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_within_a_handler_blocks_neither() -> None:
    """The launcher passes a signal on to a rank that SLURM sends it to as well; no lock may be held between the two."""
    done = limits.run([sys.executable, "-c", SIGNALED], check=True)
    assert {"call", "return"} <= {*done.stdout.split()}


def test_leaving_exits_with_the_code_that_means_try_again() -> None:
    """The launcher sees 75, also if it tells the process to end while that is leaving."""
    preemption.watch()
    try:
        with pytest.raises(SystemExit) as caught:
            preemption.leave()
        assert caught.value.code == preemption.EXIT_CODE == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        preemption.unwatch()
