"""Runs that do not end as they should: without `end_training`, by an exception, by a kill."""

import json
import sys

import pytest

from accel_testing import limits, requires

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
    accelerator.get_tracker("tensorboard")
    os.kill(os.getpid(), 9)
if end == "raise":
    raise ValueError("the script is wrong")
"""


@requires("tensorboard")
@pytest.mark.parametrize(("end", "status"), [("return", 0), ("raise", 1), ("kill", -9)])
def test_no_number_is_lost(tmp_path, end, status):
    """However a script ends by itself, each number is in its tracker or in the file; a kill loses what waited."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = limits.run([sys.executable, "-c", SCRIPT, str(tmp_path), end])
    assert done.returncode == status, done.stderr
    assert ("the script is wrong" in done.stderr) == (end == "raise")
    values = [(step, step / 8) for step in range(50)]
    events = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == values
    lines = [json.loads(line) for path in tmp_path.glob("undelivered-*") for line in path.read_text().splitlines()]
    kept = [(line["step"], line["args"][0]["loss"]) for line in lines if line["tracker"] == "hanging"]
    assert kept == ([] if end == "kill" else values)
