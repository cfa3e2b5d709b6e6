"""Runs that do not end as they should: without `end_training`, by an exception, by a kill."""

import os
import sys

import pytest

from accel_core.testing import limits, requires
from accel_trackers import spool

SCRIPT = """
import os, sys, threading
from accel_core.accelerator import Accelerator
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

class Hanging(GeneralTracker):
    name = "hanging"
    requires_logging_directory = False
    tracker = None
    def log(self, values, step=None, **kwargs):
        threading.Event().wait()

folder, end = sys.argv[1:]
settings = TrackerKwargs(drain_seconds=1.0)
accelerator = Accelerator(
    cpu=True, log_with=["tensorboard", Hanging()], project_dir=folder, kwargs_handlers=[settings]
)
accelerator.init_trackers("project", {"lr": 0.1})
for step in range(50):
    accelerator.log({"loss": step / 8}, step=step)
if end == "kill":
    hub = accelerator._runtime.hub
    hub._distributor.drain(5)
    hub._recorder.drain(5)
    os.kill(os.getpid(), 9)
if end == "raise":
    raise ValueError("the script is wrong")
"""


FORK = """
import os
from accel_core.accelerator import Accelerator
from accel_core.tracking.tracker import GeneralTracker

class Printing(GeneralTracker):
    name = "printing"
    requires_logging_directory = False
    tracker = None
    def log(self, values, step=None, **kwargs):
        print(values, flush=True)

accelerator = Accelerator(cpu=True, log_with=Printing())
accelerator.init_trackers("project")
child = os.fork()
if child == 0:
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    os._exit(0)
os.waitpid(child, 0)
accelerator.log({"loss": 3.0})
accelerator.end_training()
"""


def test_what_a_fork_logs_is_not_lost_in_silence(tmp_path):
    """A forked process has none of the threads that take what is logged: it says so once, and its parent goes on."""
    environment = os.environ | {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = limits.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK], env=environment)
    assert (done.returncode, done.stdout) == (0, "{'loss': 3.0}\n"), done.stderr
    assert done.stderr.count("they are not stored. Log in the process that called init_trackers.") == 1


@requires("tensorboard")
@pytest.mark.parametrize(("end", "status"), [("return", 0), ("raise", 1), ("kill", -9)])
def test_no_number_is_lost(tmp_path, end, status):
    """However a script ends, each number is with its tracker or in the spool; a hanging tracker holds nothing up."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = limits.run([sys.executable, "-c", SCRIPT, str(tmp_path), end])
    assert done.returncode == status, done.stderr
    assert ("the script is wrong" in done.stderr) == (end == "raise")
    (path,) = spool.find(tmp_path)
    kept = spool.read(path)
    values = [(step, step / 8) for step in range(50)]
    owed = [(entry["step"], entry["values"]["loss"]) for entry in kept.unsent("hanging") if entry["kind"] == "log"]
    assert owed == values
    assert kept.ended == (end != "kill")
    events = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")] if events.Tags()["scalars"] else []
    waiting = [(entry["step"], entry["values"]["loss"]) for entry in kept.unsent("tensorboard")[-50:]]
    assert sorted({*shown, *waiting}) == values
    assert end == "kill" or waiting == []
