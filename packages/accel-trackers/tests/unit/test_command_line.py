"""Tests of `accel trackers`: drawing and replaying."""

import argparse
import importlib.metadata
import json
import subprocess
import sys

import pytest

from accel_core.errors import ConfigurationError, TrackerError
from accel_core.testing import requires
from accel_core.tracking import discovery, spool
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker
from accel_trackers import command
from accel_trackers.command_line import run
from accel_trackers.plot import draw


class Flaky(GeneralTracker):
    """Raises while its network is down; keeps what it gets per run."""

    name = "flaky"
    requires_logging_directory = False
    down = True
    runs: dict = {}

    def __init__(self, run_name, run=None):
        super().__init__()
        self.run = run or f"run-{len(self.runs)}"

    @property
    def tracker(self):
        """The name of the run."""
        return self.run

    def start(self):
        """Open the run."""
        self.runs.setdefault(self.run, [])

    def _send(self, *call):
        if type(self).down:
            raise ConnectionError("no network")
        self.runs[self.run].append(call)

    def store_init_configuration(self, values):
        """Send."""
        self._send("config", values)

    def log(self, values, step=None, **kwargs):
        """Send."""
        if values.get("loss") == 99:
            raise ValueError("not this one")
        self._send("log", values, step, kwargs)

    def log_images(self, values, step=None):
        """Send."""
        self._send("images", values["x"].tolist(), step)

    def log_artifact(self, local_path, artifact_path=None):
        """Send."""
        with open(local_path) as file:
            self._send("artifact", file.read())

    def state_dict(self):
        """Return the run."""
        return {"run": self.run}

    def load_state_dict(self, state):
        """Take the run."""
        self.run = state["run"]


@pytest.fixture(autouse=True)
def _flaky():
    discovery.register_tracker_class(Flaky)
    Flaky.down, Flaky.runs = True, {}
    yield
    del discovery.LOGGER_TYPE_TO_CLASS["flaky"]


def _arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def _failed_run(folder, losses=(1.0, 0.5, 0.25)):
    import numpy as np

    hub = TrackerHub("flaky", folder, settings=TrackerKwargs(spool_dir=folder / "spool"))
    hub.init("project", {"lr": 0.1, "none": None})
    for step, loss in enumerate(losses):
        hub.log({"loss": loss}, step=step, log_kwargs={"flaky": {"extra": 1}})
    hub.get("flaky").log_images({"x": np.arange(3)}, step=2)
    (folder / "file").write_text("content")
    hub.get("flaky").log_artifact(str(folder / "file"))
    (folder / "file").unlink()
    hub.finish()


def test_replay_sends_everything_to_the_same_run(tmp_path, capsys):
    """After the network is back, the run gets configuration, values, images and files, once, and the spool goes."""
    _failed_run(tmp_path)
    Flaky.down = False
    assert run(_arguments("replay", tmp_path)) == 0
    assert "flaky: 6 entries sent" in capsys.readouterr().out
    assert list(Flaky.runs) == ["run-0"]
    assert Flaky.runs["run-0"] == [
        ("config", {"lr": 0.1, "none": None}),
        *[("log", {"loss": loss}, step, {"extra": 1}) for step, loss in enumerate((1.0, 0.5, 0.25))],
        ("images", [0, 1, 2], 2),
        ("artifact", "content"),
    ]
    assert not (tmp_path / "spool").exists()
    assert run(_arguments("replay", tmp_path)) == 0
    assert "nothing to send" in capsys.readouterr().out


def test_replay_that_fails_goes_on_later(tmp_path, capsys):
    """What a failing replay sent is not sent again; the rest stays."""
    _failed_run(tmp_path, (1.0, 99, 2.0))
    Flaky.down = False
    assert run(_arguments("replay", tmp_path)) == 1
    assert "2 entries sent; 4 left: ValueError: not this one" in capsys.readouterr().out
    assert len(Flaky.runs["run-0"]) == 2
    assert run(_arguments("replay", tmp_path)) == 1
    assert "0 entries sent; 4 left" in capsys.readouterr().out
    (path,) = spool.find(tmp_path)
    assert len(spool.read(path).unsent("flaky")) == 4


@requires("tensorboard")
def test_replay_to_another_tracker(tmp_path, capsys):
    """Entries go to another tracker when asked, here TensorBoard, read back with its reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _failed_run(tmp_path)
    (path,) = spool.find(tmp_path)
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] != "call"]
    path.write_text("\n".join(kept) + "\n")
    assert run(_arguments("replay", path, "--to", "tensorboard", "--keep")) == 0
    events = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert path.exists()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("replay", "none"), TrackerError, "no file or folder"),
        (("show", "none"), TrackerError, "no file or folder"),
        (("replay", ".", "--init", "{"), ConfigurationError, "--init is not JSON"),
        (("replay", ".", "--to", "flakey"), ConfigurationError, "Did you mean 'flaky'"),
        (("show", "."), ConfigurationError, "nothing to draw"),
        (("show", ".", "--width", "0"), ConfigurationError, "1 or more"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, words, error, message):
    """A path, name or number that cannot be meant is an error that says so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run(_arguments(*words))


def test_replay_of_a_running_run(tmp_path):
    """A spool whose process lives is left alone."""
    head = {"kind": "run", "version": 1, "run_id": "r", "project": "p", "trackers": ["flaky"], "started": 0.0}
    import socket

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        path = tmp_path / "a.spool.jsonl"
        writer = spool.SpoolWriter(path)
        writer.write({**head, "host": socket.gethostname(), "pid": sleeper.pid})
        writer.write({"kind": "config", "seq": 1, "only": None, "values": {}})
        writer.close(keep=True)
        with pytest.raises(TrackerError, match="still going on"):
            run(_arguments("replay", path))
    finally:
        sleeper.kill()
        sleeper.wait()


def test_show_draws_spool_and_event_files(tmp_path, capsys):
    """The curves of the last runs are drawn from the spool, by name."""
    _failed_run(tmp_path, tuple(1 / (step + 1) for step in range(20)))
    assert run(_arguments("show", tmp_path, "--width", "40", "--height", "6")) == 0
    out = capsys.readouterr().out
    assert "• project" in out
    assert "\nloss\n   1 |•\n" in out
    assert "0.05 |" in out
    assert out.rstrip().endswith("19")
    with pytest.raises(ConfigurationError, match="logged acc; there are loss"):
        run(_arguments("show", tmp_path, "--name", "acc"))


@requires("tensorboard")
def test_show_reads_event_files(tmp_path, capsys):
    """The curves of TensorBoard's files are drawn without a browser."""
    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("digits")
    for step in range(5):
        hub.log({"accuracy": step / 4}, step=step)
    hub.finish()
    assert run(_arguments("show", tmp_path)) == 0
    out = capsys.readouterr().out
    assert "• digits" in out
    assert "\naccuracy\n1 |" in out


def test_draw_marks_every_run_and_counts_what_is_not_finite():
    """Each curve has its mark, in the place of its values; undefined values are counted."""
    text = draw("x", {"a": [(0, 0.0), (4, 4.0)], "b": [(0, 4.0), (4, float("nan"))]}, width=5, height=5)
    assert text.splitlines() == [
        "x",
        "4 |b   a",
        "  |   a",
        "  |  a",
        "  | a",
        "0 |a",
        "  +-----",
        "   0   4",
        "  (1 values are not finite)",
    ]
    assert "no finite values" in draw("x", {"a": [(0, float("inf"))]}, width=5, height=5)


def test_command_is_found_and_light():
    """The command is offered by entry point, and is described without importing torch."""
    (point,) = [point for point in importlib.metadata.entry_points(group="accel.commands") if point.name == "trackers"]
    assert point.value == "accel_trackers.command"
    code = "import accel_trackers.command, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
