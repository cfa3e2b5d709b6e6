"""One command is run and seen through."""

import sys

from accel_testing import limits

EARLY = """
import os, signal, sys
from accel_launch.supervision import supervisor
from accel_launch.supervision.run import supervise
started = supervisor.Supervisor.started
def late(self, rank, pid):
    os.kill(os.getpid(), signal.SIGTERM)
    started(self, rank, pid)
supervisor.Supervisor.started = late
settings = {"log_dir": None, "tee": "0", "watchdog": None, "quiet": False, "role": ""}
print(supervise([sys.executable, "-c", "import time; time.sleep(3600)"], os.environ, settings, one_rank=True))
"""


def test_a_signal_that_comes_before_the_process_is_known_ends_it() -> None:
    """The launcher survives it, hands it on when the process is there, and returns 128 + 15."""
    done = limits.run([sys.executable, "-c", EARLY])
    assert done.stdout.strip() == "143", (done.returncode, done.stderr)
