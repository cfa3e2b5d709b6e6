"""Tests of finding what records a run, and of what a hub tells it."""

import sys

import pytest

from accel_core.tracking import discovery
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.recording import recorder_for
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

NOTEBOOK = '''
class Notebook:
    """Keeps every line in a list."""

    made = []

    def __init__(self, folder, run):
        self.path = folder / "notes"
        self.run = run
        self.lines, self.files, self.closed = [], [], None
        self.made.append(self)

    def write(self, line):
        self.lines.append(dict(line))

    def keep_file(self, path, seconds):
        self.files.append(path)
        return f"copy of {path}"

    def take_over(self, run_id, step, seconds):
        self.asked = (run_id, step)
        values = {"loss": 7}
        return [{"kind": "log", "only": ["listing"], "step": 3, "filled": 3, "time": 0, "values": values, "kwargs": {}}]

    def drain(self, seconds):
        return True

    def close(self, unsent, *, keep, seconds, quiet):
        self.closed = (unsent, keep)
'''


class Listing(GeneralTracker):
    """Keeps what it is given; raises at step 1."""

    name = "listing"
    requires_logging_directory = False
    tracker = None

    def __init__(self, project=None):
        super().__init__()
        self.files = []
        self.steps = []

    def log(self, values, step=None, **kwargs):
        """Raise at step 1."""
        if step == 1:
            raise ConnectionError("no network")
        self.steps.append(step)

    def log_artifact(self, local_path, artifact_path=None):
        """Keep the path."""
        self.files.append((local_path, artifact_path))

    def state_dict(self):
        """Return an id."""
        return {"id": 7}


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Offer a recorder as a distribution does, and return its class."""
    metadata = tmp_path / "site" / "notes-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[accel.recorders]\nnotes = notes_of_a_run:Notebook\n")
    (tmp_path / "site" / "notes_of_a_run.py").write_text(NOTEBOOK)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield recorder_for(TrackerKwargs())
    del sys.modules["notes_of_a_run"]


def test_a_run_is_told_to_its_recorder(notebook, tmp_path, monkeypatch):
    """The recorder that a distribution offers gets every entry, what became of each, and whether to keep them."""
    monkeypatch.setitem(discovery.LOGGER_TYPE_TO_CLASS, "listing", Listing)
    hub = TrackerHub("listing", settings=TrackerKwargs(spool_dir=tmp_path / "kept"))
    hub.init("project", {"lr": 0.1})
    files = hub.get("listing").files
    (recorder,) = notebook.made
    assert hub.spool_path == recorder.path == tmp_path / "kept" / "notes"
    assert recorder.run == {"run_id": hub.run_id, "project": "project", "trackers": ["listing"]}
    for step in range(3):
        hub.log({"loss": step}, step=step)
    hub.get("listing").log_artifact("file", artifact_path="place")
    hub.get("listing").log_artifact(local_path="other")
    hub.finish()
    lines = recorder.lines
    entries = {line["seq"]: line for line in lines if line["kind"] in ("config", "log", "call")}
    assert [entries[seq]["kind"] for seq in sorted(entries)] == ["config", "log", "log", "log", "call", "call"]
    assert [line["seq"] for line in lines if line["kind"] == "sent"] == [[1], [2], [4], [5], [6]]
    assert [line["error"] for line in lines if line["kind"] == "failed"] == ["ConnectionError: no network"]
    assert [line["state"] for line in lines if line["kind"] == "state"] == [{"id": 7}]
    assert lines[-1]["kind"] == "end"
    assert recorder.closed == ({"listing": {3}}, False)
    assert recorder.files == ["file", "other"]
    assert files == [("copy of file", "place"), ("copy of other", None)]


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_run_takes_over_what_was_left(notebook, late):
    """What the recorder finds of killed processes is sent before the run's own, and told to be taken over after it."""
    tracker = Listing()
    hub = TrackerHub(tracker)
    steps = {"explicit": True, "count": 5, "last": 4, "names": {"loss": 4}}
    state = {"run_id": "earlier", "steps": steps, "trackers": {}}
    if late:
        hub.init("project")
    hub.load_state_dict(state)
    if not late:
        hub.init("project")
    hub.log({"loss": 1}, step=5)
    hub.finish()
    recorder = notebook.made[-1]
    assert recorder.asked == ("earlier", 4)
    assert tracker.steps == [3, 5]
    kinds = [line["kind"] for line in recorder.lines if line["kind"] in ("log", "resumed")]
    assert kinds == ["log", "resumed", "log"]


def test_a_record_of_which_everything_is_sent_is_not_kept(notebook, tmp_path):
    """Where nothing is left to send, the recorder is told to remove the record, unless the user keeps it."""
    for keep in (False, True):
        hub = TrackerHub(Listing(), settings=TrackerKwargs(spool_dir=tmp_path, keep_spool=keep))
        hub.init("project")
        hub.log({"loss": 0}, step=0)
        hub.finish()
    assert [made.closed for made in notebook.made] == [({}, False), ({}, True)]
