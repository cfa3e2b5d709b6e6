"""Tests of `accel trackers`: drawing and replaying."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from accel_core.errors import ConfigurationError, TrackerError
from accel_core.testing import requires
from accel_core.tracking import discovery
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker
from accel_trackers import command, spool
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


def test_replay_to_a_tracker_that_no_run_had(tmp_path, capsys):
    """A name that is misspelt is refused before anything is sent; where no spool is left, there is nothing to send."""
    _failed_run(tmp_path)
    Flaky.down = False
    with pytest.raises(ConfigurationError, match="logged to flakey; there are flaky"):
        run(_arguments("replay", tmp_path, "--tracker", "flaky", "--tracker", "flakey"))
    assert Flaky.runs == {"run-0": []}
    assert run(_arguments("replay", tmp_path, "--tracker", "flaky")) == 0
    assert run(_arguments("replay", tmp_path, "--tracker", "flaky")) == 0
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
        (("replay", ".", "--init", "[1]"), ConfigurationError, "--init is not JSON"),
        (("replay", "x" * 5000), TrackerError, "no file or folder"),
        (("replay", ".", "--to", "flakey"), ConfigurationError, "Did you mean 'flaky'"),
        (("show", "."), ConfigurationError, "nothing to draw"),
        (("show", ".", "--width", "0"), ConfigurationError, "1 or more"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, words, error, message):
    """A path, name or number that is not valid is an error that says so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run(_arguments(*words))


def test_replay_of_a_running_run(tmp_path, capsys):
    """A spool whose process lives is left alone."""
    head = {"kind": "run", "version": 1, "run_id": "r", "project": "p", "trackers": ["flaky"], "started": 0.0}
    import socket

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        path = tmp_path / "a.spool.jsonl"
        writer = spool.SpoolWriter(path)
        writer.write({**head, "host": socket.gethostname(), "pid": sleeper.pid})
        writer.write({"kind": "config", "seq": 1, "only": None, "values": {}})
        writer.close(keep=True)
        assert run(_arguments("replay", path)) == 1
        assert "a.spool.jsonl is still going on; its process is" in capsys.readouterr().out
    finally:
        sleeper.kill()
        sleeper.wait()


def _spool(path, *lines, trackers=("flaky",), project="p"):
    head = {"kind": "run", "version": 1, "run_id": "r", "project": project, "trackers": list(trackers)}
    head |= {"started": 0.0, "host": "elsewhere", "pid": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    return path


def _call(method, *args, **kwargs):
    return {"kind": "call", "seq": 1, "only": None, "method": method, "args": list(args), "kwargs": kwargs}


LOG = {"kind": "log", "seq": 1, "only": None, "step": 0, "filled": 0, "values": {"loss": 1}, "kwargs": {}}


def test_one_bad_file_does_not_stop_the_folder(tmp_path, capsys):
    """Each refused file is one line that names it, the others are sent, and the status tells."""
    Flaky.down = False
    bad = tmp_path / "a" / "bad.spool.jsonl"
    bad.parent.mkdir()
    bad.write_bytes(b"\xff\x00junk\n")
    (tmp_path / "folder.spool.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.spool.jsonl")
    good = _spool(tmp_path / "b" / "good.spool.jsonl", LOG)
    assert run(_arguments("replay", tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "bad.spool.jsonl", "folder.spool.jsonl", "good.spool.jsonl", "pipe.spool.jsonl",
    ]  # fmt: skip
    assert "good.spool.jsonl: flaky: 1 entries sent" in lines
    assert bad.read_bytes() == b"\xff\x00junk\n"
    assert not good.exists()


@pytest.mark.parametrize(
    "method", ["__setattr__", "__reduce__", "finish", "start", "release", "load_state_dict", "_send"]
)
def test_replay_calls_logging_methods_only(tmp_path, capsys, method):
    """A file that names any other method is refused, and no tracker is made for it."""
    Flaky.down = False
    path = _spool(tmp_path / "a.spool.jsonl", LOG, {**_call(method, "down", True), "seq": 2})
    assert run(_arguments("replay", path)) == 1
    assert "'method' is one of log, log_artifact, log_artifacts" in capsys.readouterr().out
    assert Flaky.runs == {}
    assert path.exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_call("log_artifact", "/etc/hostname"), "outside of a.files"),
        (_call("log_artifact", "../a.files/../../secret"), "outside of a.files"),
        (_call("log_artifact", "link/secret"), "outside of a.files"),
        (_call("log_artifact", "none/own"), "outside of a.files"),
        (_call("log_artifact"), "outside of a.files"),
        (_call("log_artifact", "artifact-1/own", "/etc/cron.d/x"), "outside of the run's folder"),
        (_call("log_artifact", "artifact-1/own", artifact_path="../../x"), "outside of the run's folder"),
    ],
)
def test_replay_sends_no_file_but_its_own(tmp_path, capsys, call, message):
    """A file that is not the spool's own copy is not sent, and none is kept outside of the run's folder."""
    Flaky.down = False
    (tmp_path / "a.files" / "artifact-1").mkdir(parents=True)
    (tmp_path / "a.files" / "artifact-1" / "own").write_text("content")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "a.files" / "link").symlink_to(tmp_path / "outside")
    path = _spool(tmp_path / "a.spool.jsonl", call)
    assert run(_arguments("replay", path)) == 1
    assert message in capsys.readouterr().out
    assert Flaky.runs == {"run-0": []}


def test_replay_finds_files_of_a_spool_that_was_moved(tmp_path, capsys):
    """The copies of logged files are found beside the spool file, wherever both were moved since."""
    (tmp_path / "first").mkdir()
    _failed_run(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "second")
    Flaky.down = False
    assert run(_arguments("replay", tmp_path / "second")) == 0
    assert Flaky.runs["run-0"][-1] == ("artifact", "content")


@requires("tensorboard")
@pytest.mark.parametrize("project", ["/{folder}/outside", "../outside", "a/../../outside"])
def test_replay_writes_below_its_folder_only(tmp_path, capsys, project):
    """A project that names a place outside of the logging directory is refused for trackers that write to one."""
    project = project.format(folder=tmp_path)
    path = _spool(tmp_path / "logs" / "spool" / "a.spool.jsonl", LOG, trackers=["tensorboard"], project=project)
    assert run(_arguments("replay", path)) == 1
    assert "outside of the run's folder" in capsys.readouterr().out
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("raised", [SystemExit(3), RuntimeError("two\nlines"), GeneratorExit()])
def test_a_library_that_ends_the_process_does_not_end_the_replay(tmp_path, capsys, monkeypatch, raised):
    """Whatever a tracker raises is one line for its file, and the next file is sent."""
    Flaky.down = False
    sent = Flaky.log

    def log(self, values, step=None, **kwargs):
        if values["loss"] == 1:
            raise raised
        sent(self, values, step, **kwargs)

    monkeypatch.setattr(Flaky, "log", log)
    _spool(tmp_path / "a.spool.jsonl", LOG)
    _spool(tmp_path / "b.spool.jsonl", {**LOG, "values": {"loss": 2}})
    assert run(_arguments("replay", tmp_path)) == 1
    first, second = sorted(capsys.readouterr().out.splitlines())
    assert first.startswith(f"a.spool.jsonl: flaky: 0 entries sent; 1 left: {type(raised).__name__}")
    assert second == "b.spool.jsonl: flaky: 1 entries sent"


def test_show_draws_past_files_it_refuses(tmp_path, capsys):
    """Runs are drawn although a file beside them is refused, by a line that cannot steer the terminal."""
    (tmp_path / "bad.spool.jsonl").write_text("junk\n")
    _spool(tmp_path / "good.spool.jsonl", {**LOG, "values": {"loss\x1b[2J\n": 1.0}}, project="\x1b]0;x\x07")
    assert run(_arguments("show", tmp_path)) == 0
    printed = capsys.readouterr()
    assert "bad.spool.jsonl is damaged" in printed.err
    assert "\nloss\\x1b[2J\\n\n" in printed.out
    assert "\x1b" not in printed.out


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


@requires("tensorboard")
@pytest.mark.parametrize("content", [b"", b"junk" * 50])
def test_show_draws_past_event_files_of_junk(tmp_path, capsys, content):
    """An event file that tensorboard does not read is one line, and the other runs are drawn."""
    (tmp_path / "events.out.tfevents.1.junk").write_bytes(content)
    (tmp_path / "events.out.tfevents.folder").mkdir()
    _spool(tmp_path / "good.spool.jsonl", LOG)
    assert run(_arguments("show", tmp_path)) == 0
    printed = capsys.readouterr()
    assert f"The event files in {tmp_path} cannot be read by tensorboard" in printed.err
    assert "• p" in printed.out


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
    wide = draw("x", {"a": [(0, -1.7e308), (1, 1.7e308), (1, 1.7e308)]}, width=2, height=2)
    assert wide.splitlines()[1:3] == [" 1.7e+308 | a", "-1.7e+308 |a"]
    assert "no finite values" in draw("x", {"a": [(0, float("inf"))]}, width=5, height=5)


def test_command_is_found_and_light():
    """The command is offered by entry point, and is described without importing torch."""
    (point,) = [point for point in importlib.metadata.entry_points(group="accel.commands") if point.name == "trackers"]
    assert point.value == "accel_trackers.command"
    code = "import accel_trackers.command, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
