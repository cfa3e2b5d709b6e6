"""Tests of runs that are recorded in a spool file: what it holds, and disks that are full or hang."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from accel_core.testing import limits
from accel_core.tracking import discovery, worker
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker
from accel_trackers import spool
from accel_trackers.recorder import SpoolRecorder
from accel_trackers.takeover import left_behind


class Keeping(GeneralTracker):
    """Keeps what is logged."""

    name = "keeping"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def tracker(self):
        """The list of calls."""
        return self.calls

    def store_init_configuration(self, values):
        """Keep the call."""
        self.keep("config", values)

    def log(self, values, step=None, **kwargs):
        """Keep the call."""
        self.keep(step, values)

    def log_artifact(self, local_path, artifact_path=None):
        """Keep the file's content."""
        with open(local_path) as file:
            self.keep("artifact", file.read(), artifact_path)

    def keep(self, *call):
        """Keep one call."""
        self.calls.append(call)


@pytest.fixture
def named(monkeypatch):
    """Offer `Keeping` by its name; return the list of those that are made."""
    made = []

    class Named(Keeping):
        """Is asked for by its name."""

        def __init__(self, project):
            super().__init__()
            made.append(self)

    monkeypatch.setitem(discovery.LOGGER_TYPE_TO_CLASS, "keeping", Named)
    return made


class Raising(Keeping):
    """Raises at every call."""

    name = "raising"

    def keep(self, *call):
        """Raise."""
        raise ConnectionError("no network")


def _hub(tmp_path, *trackers, **kwargs):
    return TrackerHub(list(trackers), settings=TrackerKwargs(spool_dir=tmp_path / "spool", **kwargs))


def test_nothing_is_left_of_a_run_that_went_well(tmp_path):
    """The spool goes when every tracker has everything."""
    tracker = Keeping()
    hub = _hub(tmp_path, tracker)
    hub.init("project", {"a": 1})
    path = hub.spool_path
    assert path.is_file()
    hub.log({"loss": 1.0}, step=0)
    hub.finish()
    assert tracker.calls == [("config", {"a": 1}), (0, {"loss": 1.0})]
    assert not (tmp_path / "spool").exists()


def test_what_a_blocked_tracker_did_not_take_is_kept(tmp_path, caplog):
    """What a tracker that hangs did not take is in the spool, and the end says where and how to send it."""
    gate = threading.Event()

    class Held(Keeping):
        """Blocks until it is let go."""

        name = "held"

        def keep(self, *call):
            """Wait."""
            gate.wait(limits.limit())

    good = Keeping()
    hub = _hub(tmp_path, Held(), good, drain_seconds=0.2)
    hub.init("project")
    for step in range(100):
        hub.log({"loss": float(step)}, step=step)
    path = hub.spool_path
    hub.finish()
    gate.set()
    kept = spool.read(path)
    assert [(entry["step"], entry["values"]) for entry in kept.unsent("held")] == good.calls
    assert [step for step, _ in good.calls] == list(range(100))
    assert kept.unsent("keeping") == []
    assert kept.ended
    assert f"accel trackers replay {path}" in caplog.text


def test_warn_keeps_what_a_raising_tracker_did_not_take(tmp_path, caplog):
    """A tracker that raises at every call costs warnings, no value and no step."""
    bad, good = Raising(), Keeping()
    hub = _hub(tmp_path, bad, good)
    hub.init("project", {"a": 1})
    path = hub.spool_path
    for step in range(5):
        hub.log({"loss": torch.tensor(step / 4), "text": "x"}, step=step)
    hub.finish()
    kept = spool.read(path)
    assert good.calls[1:] == [(step, {"loss": torch.tensor(step / 4), "text": "x"}) for step in range(5)]
    assert [entry["kind"] for entry in kept.unsent("raising")] == ["config", *["log"] * 5]
    assert [entry["values"]["loss"] for entry in kept.unsent("raising")[1:]] == [step / 4 for step in range(5)]
    assert "no network" in kept.errors["raising"] or "did not start" in kept.errors["raising"]
    assert "accel trackers replay" in caplog.text
    assert kept.ended


def test_artifact_may_be_removed_at_once(tmp_path, named):
    """A file is copied when it is logged, so that its owner may remove it before the tracker reads it."""
    hub = _hub(tmp_path, "keeping")
    hub.init("project")
    (tracker,) = named
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    hub.get("keeping").log_artifact(str(file), artifact_path="docs")
    file.unlink()
    hub.finish()
    assert ("artifact", "hello", "docs") in tracker.calls
    assert not (tmp_path / "spool").exists()


def test_spool_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    """Without a place for the spool the trackers still get everything."""
    (tmp_path / "spool").write_text("a file")
    tracker = Keeping()
    hub = _hub(tmp_path, tracker)
    hub.init("project")
    hub.log({"a": 1}, step=0)
    hub.finish()
    assert tracker.calls == [(0, {"a": 1})]
    assert "No spool file can be written" in caplog.text


def test_keep_spool(tmp_path):
    """A run that keeps its spool leaves every value in it, marked as sent."""
    hub = _hub(tmp_path, Keeping(), keep_spool=True)
    hub.init("my/project", {"a": 1})
    hub.log({"loss": 1.0}, step=0)
    path = hub.spool_path
    hub.finish()
    kept = spool.read(path)
    assert kept.unsent("keeping") == []
    assert [entry["kind"] for entry in kept.entries] == ["config", "log"]
    assert kept.project == "my/project"
    assert kept.run_id == hub.run_id


def test_a_full_queue_leaves_values_to_the_spool(tmp_path, monkeypatch, caplog):
    """What a full queue does not take is in the spool, and is told once."""
    gate = threading.Event()

    class Held(Keeping):
        """Blocks until it is let go."""

        def keep(self, *call):
            """Wait, then keep the call."""
            gate.wait(limits.limit())
            super().keep(*call)

    tracker = Held()
    hub = _hub(tmp_path, tracker)
    hub.init("project")
    hub._recorder.drain(60)
    monkeypatch.setattr(worker, "MOST_WAITING", 5)
    path = hub.spool_path
    for step in range(20):
        hub.log({"loss": step}, step=step)
        hub._distributor.drain(60)
        hub._recorder.drain(60)
    gate.set()
    hub.finish()
    assert [step for step, _ in tracker.calls] == list(range(5))
    assert [entry["step"] for entry in spool.read(path).unsent("keeping")] == list(range(5, 20))
    assert caplog.text.count(f"goes to {path} alone") == 1
    assert "(keeping: 15) are in" in caplog.text


def test_a_disk_that_hangs_costs_the_time_it_is_given(tmp_path, caplog, named):
    """While the disk takes nothing, trackers get everything, logging a file waits once, and the end comes."""
    gate = threading.Event()
    hub = _hub(tmp_path, "keeping", Raising(), drain_seconds=0.3)
    hub.init("project")
    (good,) = named
    recorder = hub._recorder
    recorder._worker.put(gate.wait)
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    for step in range(50):
        hub.log({"loss": step}, step=step)
    for _ in range(3):
        hub.get("keeping").log_artifact(str(file))
    hub.finish()
    calls = list(good.calls)
    gate.set()
    assert calls == [*((step, {"loss": step}) for step in range(50)), *[("artifact", "hello", None)] * 3]
    assert "could not be copied to the spool within 0.3 s" in caplog.text
    assert "are lost (raising: 50); the spool" in caplog.text
    assert recorder.drain(60)
    recorder.close({}, keep=False, seconds=60, quiet=True)


def test_a_disk_that_hangs_when_a_run_begins(tmp_path, monkeypatch):
    """A folder that cannot be opened holds the beginning no longer than trackers may."""
    gate, good = threading.Event(), Keeping()
    opened = SpoolRecorder._open

    def late(self, run):
        gate.wait(limits.limit())
        opened(self, run)

    monkeypatch.setattr(SpoolRecorder, "_open", late)
    hub = _hub(tmp_path, good, start_seconds=0.1, drain_seconds=30)
    hub.init("project")
    assert hub.spool_path is None
    hub.log({"loss": 1}, step=0)
    gate.set()
    hub.finish()
    assert good.calls == [(0, {"loss": 1})]
    assert not (tmp_path / "spool").exists()


def test_two_runs_of_one_second_do_not_share_a_file(tmp_path):
    """Runs of the same name, process and second have their own files."""
    run = {"run_id": "r", "project": "p", "trackers": ["a"]}
    recorders = [SpoolRecorder(tmp_path, run) for _ in range(3)]
    assert all(recorder.drain(60) for recorder in recorders)
    assert len({recorder.path for recorder in recorders}) == 3
    for recorder in recorders:
        recorder.close({}, keep=True, seconds=60, quiet=True)
    assert all(spool.read(path).run_id == "r" for path in spool.find(tmp_path))


def test_a_folder_that_cannot_be_copied_leaves_nothing(tmp_path, caplog, named):
    """A logged file that cannot be copied fails like a tracker fails, and no half copy stays."""
    hub = _hub(tmp_path, "keeping", keep_spool=True)
    hub.init("project")
    path = hub.spool_path
    hub.get("keeping").log_artifact(str(tmp_path / "none"))
    hub.finish()
    assert "log_artifact" in caplog.text
    assert list(spool.files_of(path).iterdir()) == []


KILLED = """
import os, sys
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

class Down(GeneralTracker):
    name = "keeping"
    requires_logging_directory = False
    tracker = None
    def log(self, values, step=None, **kwargs):
        if values["loss"] in (1, 5):
            raise ConnectionError("no network")

hub = TrackerHub(Down(), settings=TrackerKwargs(spool_dir=sys.argv[1]))
hub.init("project", {"lr": 1})
for step in range(4):
    hub.log({"loss": step}, step=step)
state = hub.state_dict()
for step in range(4, 7):
    hub.log({"loss": step}, step=step)
hub._deliver(hub._sessions["keeping"])
hub._recorder.drain(60)
import json
print(json.dumps(state), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_nothing_stays_of_a_process_that_was_killed_when_its_run_goes_on(tmp_path):
    """The resumed run sends what was not sent before its checkpoint, and the killed process's file is gone."""
    words = [sys.executable, "-c", KILLED, str(tmp_path / "spool")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    (left,) = spool.find(tmp_path / "spool")
    assert [entry["step"] for entry in spool.read(left).unsent("keeping")] == [1, 5]
    tracker = Keeping()
    hub = _hub(tmp_path, tracker)
    hub.init("project", {"lr": 1})
    hub.load_state_dict(json.loads(done.stdout))
    hub._deliver(hub._sessions["keeping"])
    hub._recorder.drain(60)
    assert spool.find(tmp_path / "spool") == [hub.spool_path]
    for step in range(4, 7):
        hub.log({"loss": step}, step=step)
    hub.finish()
    assert tracker.calls == [("config", {"lr": 1}), *[(step, {"loss": step}) for step in (1, 4, 5, 6)]]
    assert not (tmp_path / "spool").exists()


def test_files_of_others_are_not_taken_over(tmp_path):
    """What belongs to another run, was written elsewhere, ended well or holds what cannot be sent stays as it is."""
    facts = {"version": 1, "run_id": "r", "project": "p", "trackers": ["a"], "started": 0, "host": socket.gethostname()}
    head = {"kind": "run", **facts, "pid": 2**22 + 1}
    log = {"kind": "log", "seq": 1, "only": None, "step": 1, "filled": 1, "time": 0, "values": {"x": 1}, "kwargs": {}}
    file = {"kind": "call", "seq": 2, "only": ["a"], "method": "log_artifact", "args": ["x"], "kwargs": {}}
    files = {
        "mine": [head, log],
        "another": [{**head, "run_id": "other"}, log],
        "elsewhere": [{**head, "host": "elsewhere"}, log],
        "running": [{**head, "pid": os.getppid()}, log],
        "ended": [head, log, {"kind": "end", "time": 0}],
        "file": [head, log, file],
        "fewer": [{**head, "trackers": ["a", "b"]}, log],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}{spool.SUFFIX}").write_text(text)
    (tmp_path / f"damaged{spool.SUFFIX}").write_text("nonsense\n")
    (found,) = left_behind(tmp_path / f"own{spool.SUFFIX}", "r", 5, ["a"])
    assert found.path.name == f"mine{spool.SUFFIX}"
    assert [entry["values"] for entry in found.entries] == [{"x": 1}]
    before = left_behind(tmp_path / f"own{spool.SUFFIX}", "r", 0, ["a"])
    assert {left.path.name.partition(".")[0]: left.entries for left in before} == {"mine": [], "file": [], "fewer": []}
