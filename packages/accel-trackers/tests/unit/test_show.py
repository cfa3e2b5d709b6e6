"""Tests of `accel trackers show`."""

import argparse
import importlib.metadata
import json
import subprocess
import sys

import pytest

from accel_core.errors import ConfigurationError, TrackerError
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import requires
from accel_trackers import command
from accel_trackers.plot import draw
from accel_trackers.show import run


class Down(GeneralTracker):
    """Has no network."""

    name, requires_logging_directory, tracker = "down", False, None

    def log(self, values, step=None, **kwargs):
        """Raise."""
        raise ConnectionError("no network")


def _arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["show", *map(str, words)])


def _failed_run(folder, project="digits", values=({"loss": 1.0},)):
    hub = TrackerHub(Down(), folder)
    hub.init(project, {"lr": 0.1})
    for step, row in enumerate(values):
        hub.log(row, step=step)
    hub.finish()
    (path,) = folder.glob(f"undelivered-{hub.run_id}.jsonl")
    return path


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("none",), TrackerError, "no file or folder"),
        (("x" * 5000,), TrackerError, "no file or folder"),
        ((".",), ConfigurationError, r"nothing to draw of any value below \.; .* have no numbers"),
        ((".", "--width", "0"), ConfigurationError, "1 or more"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, words, error, message):
    """A path or number that is not valid is an error that says so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run(_arguments(*words))


def test_undelivered_values_are_drawn(tmp_path, capsys):
    """The curves of a run whose tracker failed are drawn from its file, which may be named, or its folder."""
    path = _failed_run(tmp_path, values=[{"loss": 1 / (step + 1)} for step in range(20)])
    for place in (tmp_path, path):
        assert run(_arguments(place, "--width", "40", "--height", "6")) == 0
        out = capsys.readouterr().out
        assert out.startswith("• digits  ")
        assert "undelivered to down\n\nloss\n   1 |•\n" in out
        assert "0.05 |" in out
        assert out.rstrip().endswith("19")
    with pytest.raises(ConfigurationError, match=r"nothing to draw of acc below .* have loss"):
        run(_arguments(tmp_path, "--name", "acc"))


@requires("tensorboard")
def test_event_files_are_drawn(tmp_path, capsys):
    """The curves of TensorBoard's files are drawn without a browser, by the folder or a file of it."""
    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("digits")
    for step in range(5):
        hub.log({"accuracy": step / 4}, step=step)
    hub.finish()
    (file,) = (tmp_path / "digits").glob("*tfevents*")
    for place in (tmp_path, file):
        assert run(_arguments(place)) == 0
        out = capsys.readouterr().out
        assert "• digits" in out
        assert "\naccuracy\n1 |" in out


def test_a_line_that_was_cut_off_is_left_out(tmp_path, capsys):
    """The lines before the one that a killed process left are drawn."""
    path = _failed_run(tmp_path, values=[{"loss": 1.0}, {"loss": 2.0}])
    path.write_text(path.read_text() + '{"run": "')
    assert run(_arguments(tmp_path)) == 0
    assert "\nloss\n2 |" in capsys.readouterr().out


@pytest.mark.parametrize("junk", ["junk\n", "[]\n", "{}\n", '{"method": "log"}\n'])
def test_a_file_of_junk_is_left_out(tmp_path, capsys, junk):
    """Runs are drawn although a file beside them is refused, by a line that cannot steer the terminal."""
    (tmp_path / "undelivered-bad\x1b.jsonl").write_text(junk)
    _failed_run(tmp_path, "\x1b]0;x\x07", [{"loss\x1b[2J\n": 1.0}])
    assert run(_arguments(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "undelivered-bad\\x1b.jsonl cannot be read, and is left out" in printed.err
    assert "\nloss\\x1b[2J\\n\n" in printed.out
    assert "\x1b" not in printed.out + printed.err


@requires("tensorboard")
@pytest.mark.parametrize("content", [b"", b"junk" * 50])
def test_an_event_file_of_junk_is_left_out(tmp_path, capsys, content):
    """An event file that tensorboard does not read is one line, and the other runs are drawn."""
    (tmp_path / "events.out.tfevents.1.junk").write_bytes(content)
    (tmp_path / "events.out.tfevents.folder").mkdir()
    _failed_run(tmp_path)
    assert run(_arguments(tmp_path)) == 0
    printed = capsys.readouterr()
    assert f"{tmp_path} cannot be read, and is left out" in printed.err
    assert "• digits" in printed.out


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


def test_values_that_are_not_finite_are_kept(tmp_path, capsys):
    """A loss that overflowed is in the file, and is counted when it is drawn."""
    path = _failed_run(tmp_path, values=[{"loss": 1.0}, {"loss": float("nan")}])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if '"log"' in line] == [0, 1]
    assert run(_arguments(tmp_path)) == 0
    assert "(1 values are not finite)" in capsys.readouterr().out


def test_command_is_found_and_light():
    """The command is offered by entry point, and is described without importing torch."""
    (point,) = [point for point in importlib.metadata.entry_points(group="accel.commands") if point.name == "trackers"]
    assert point.value == "accel_trackers.command"
    code = "import accel_trackers.command, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
