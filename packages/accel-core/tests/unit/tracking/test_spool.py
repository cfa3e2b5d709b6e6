"""Tests of the spool file."""

import pytest

from accel_core.errors import TrackerError
from accel_core.tracking import spool

HEAD = {"kind": "run", "version": 1, "run_id": "r", "project": "p", "trackers": ["a", "b"], "started": 1.0}


def _write(path, *lines):
    writer = spool.SpoolWriter(path)
    for line in lines:
        writer.write(line)
    writer.close(keep=True)


def _log(seq, only=None):
    return {"kind": "log", "seq": seq, "step": seq, "values": {"x": seq}, "only": only, "kwargs": {}}


def test_unsent_entries(tmp_path):
    """An entry is owed to every tracker it is for, until that tracker has it."""
    path = tmp_path / "one.spool.jsonl"
    _write(path, HEAD, _log(1), _log(2, ["b"]), _log(3), {"kind": "sent", "tracker": "a", "seq": [1]})
    found = spool.read(path)
    assert [entry["seq"] for entry in found.unsent("a")] == [3]
    assert [entry["seq"] for entry in found.unsent("b")] == [1, 2, 3]


def test_cut_last_line(tmp_path):
    """A line that the end of the process cut off is left out; all before it are read."""
    path = tmp_path / "one.spool.jsonl"
    _write(path, HEAD, _log(1))
    with open(path, "a") as file:
        file.write('{"kind":"log","seq":2,"val')
    assert [entry["seq"] for entry in spool.read(path).entries] == [1]


@pytest.mark.parametrize("text", ["", "{}\n", '{"kind":"run","version":99}\n', "not json\n", "[1]\n"])
def test_foreign_file(tmp_path, text):
    """A file that is not a spool file is named, and left as it is."""
    path = tmp_path / "one.spool.jsonl"
    path.write_text(text)
    with pytest.raises(TrackerError, match=r"one\.spool\.jsonl is"):
        spool.read(path)
    assert path.read_text() == text


def test_find(tmp_path):
    """Spool files are found below a folder, the oldest first."""
    for name in ("b", "a"):
        _write(tmp_path / name / f"{name}.spool.jsonl", HEAD)
    assert [path.parent.name for path in spool.find(tmp_path)] == ["b", "a"]
    assert spool.find(tmp_path / "a" / "a.spool.jsonl") == [tmp_path / "a" / "a.spool.jsonl"]
