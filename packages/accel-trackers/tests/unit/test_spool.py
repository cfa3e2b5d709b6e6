"""Tests of the spool file: what is written, and what is refused when it is read."""

import contextlib
import json
import os
import random

import pytest
import torch

from accel_core.errors import TrackerError
from accel_trackers import spool
from accel_trackers.codec import encode
from accel_trackers.recorder import SpoolRecorder

HEAD = {
    "kind": "run",
    "version": 1,
    "run_id": "r",
    "project": "p",
    "trackers": ["a", "b"],
    "started": 1.0,
    "host": "h",
    "pid": 7,
}


def _write(path, *lines):
    writer = spool.SpoolWriter(path)
    for line in lines:
        writer.write(line)
    writer.close(keep=True)


def _log(seq, only=None):
    return {"kind": "log", "seq": seq, "step": seq, "filled": seq, "values": {"x": seq}, "only": only, "kwargs": {}}


@pytest.fixture
def shared(tmp_path):
    """A folder that everybody may write to, as the system's for temporary files."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.mark.parametrize("depth", ["mine", "mine/spool", "mine/run/spool"])
def test_a_spool_in_a_shared_folder_is_ones_own(shared, depth):
    """What is made in a folder that everybody may write to can be opened by its user alone, however deep."""
    spool.make_own(shared / depth)
    spool.make_own(shared / depth)
    assert (shared / "mine").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes another user's folder")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_the_folder_of_a_stranger_is_not_used(shared, kind, caplog):
    """In a folder that everybody may write to, another user's is named in a warning, and nothing is written there."""
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir()
    place = shared / "spool"
    place.mkdir() if kind == "folder" else place.symlink_to(elsewhere)
    os.chown(place, 12345, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match=r"spool belongs to user 12345"):
        spool.make_own(place)
    recorder = SpoolRecorder(place, {"run_id": "r", "project": "p", "trackers": []})
    recorder.write({"kind": "end", "time": 1.0})
    recorder.close({}, keep=True, seconds=60.0, quiet=False)
    assert "spool belongs to user 12345" in caplog.text
    assert not list(place.iterdir())


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


def test_find(tmp_path):
    """Spool files are found below a folder, the oldest first."""
    for name in ("b", "a"):
        _write(tmp_path / name / f"{name}.spool.jsonl", HEAD)
    assert [path.parent.name for path in spool.find(tmp_path)] == ["b", "a"]
    assert spool.find(tmp_path / "a" / "a.spool.jsonl") == [tmp_path / "a" / "a.spool.jsonl"]


def _lines(*lines):
    return "".join(json.dumps(line) + "\n" for line in (HEAD, *lines))


NEST = "[" * 100_000 + "]" * 100_000
JUNK = {
    "nothing": b"",
    "empty object": b"{}\n",
    "another version": b'{"kind":"run","version":99}\n',
    "text": b"not json\n",
    "list": b"[1]\n",
    "bytes": bytes(range(256)),
    "utf-16": _lines(_log(1)).encode("utf-16"),
    "no utf-8": _lines().encode() + b'{"kind":"\xff"}\n',
    "deep": (_lines() + NEST + "\n").encode(),
    "deep value": (_lines() + '{"kind":"config","seq":1,"values":{"a":' + NEST + "}}\n").encode(),
    "huge number": (_lines() + '{"kind":"end","time":' + "9" * 10_000 + "}\n").encode(),
    "no trackers": json.dumps({**HEAD, "trackers": 3}).encode() + b"\n",
    "no run": b'{"kind":"run","version":1}\n',
    "no time": json.dumps({**HEAD, "started": float("nan")}).encode() + b"\n",
    "year 10000": json.dumps({**HEAD, "started": 1e300}).encode() + b"\n",
    "group of processes": json.dumps({**HEAD, "pid": -1}).encode() + b"\n",
    "no process": json.dumps({**HEAD, "pid": 10**30}).encode() + b"\n",
    "kind": _lines({"kind": 3}).encode(),
    "no host": json.dumps({name: value for name, value in HEAD.items() if name != "host"}).encode() + b"\n",
    "no trackers of a line": _lines({"kind": "config", "seq": 1, "values": {}}).encode(),
    "no number": _lines({"kind": "config", "only": None, "values": {}}).encode(),
    "text for number": _lines({"kind": "config", "seq": "1", "only": None, "values": {}}).encode(),
    "no values": _lines({"kind": "config", "seq": 1, "only": None}).encode(),
    "list for values": _lines({**_log(1), "values": [1]}).encode(),
    "large step": _lines({**_log(1), "step": 10**40}).encode(),
    "text for step": _lines({**_log(1), "step": "x"}).encode(),
    "kwargs": _lines({**_log(1), "kwargs": {"a": 3}}).encode(),
    "only": _lines(_log(1, 3)).encode(),
    "method": _lines(
        {"kind": "call", "seq": 1, "only": None, "method": "__setattr__", "args": ["a", 1], "kwargs": {}}
    ).encode(),
    "finish": _lines({"kind": "call", "seq": 1, "only": None, "method": "finish", "args": [], "kwargs": {}}).encode(),
    "number for method": _lines(
        {"kind": "call", "seq": 1, "only": None, "method": 1, "args": [], "kwargs": {}}
    ).encode(),
    "args": _lines({"kind": "call", "seq": 1, "only": None, "method": "log", "args": 3, "kwargs": {}}).encode(),
    "sent": _lines({"kind": "sent", "tracker": "a", "seq": 3}).encode(),
    "sent to a list": _lines({"kind": "sent", "tracker": [], "seq": [3]}).encode(),
    "state": _lines({"kind": "state", "tracker": "a", "state": 3}).encode(),
    "failed": _lines({"kind": "failed", "tracker": "a", "error": 3}).encode(),
    "resumed": _lines({"kind": "resumed"}).encode(),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_refused_in_one_line(tmp_path, name):
    """Whatever a file holds, it is read, or refused by an error of one line that names it; the file stays as it is."""
    path = tmp_path / "one.spool.jsonl"
    path.write_bytes(JUNK[name])
    with pytest.raises(TrackerError, match=r"one\.spool\.jsonl is") as info:
        spool.read(path)
    assert "\n" not in str(info.value)
    assert path.read_bytes() == JUNK[name]


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "x"},
        {"$float": []},
        {"$dtype": "save"},
        {"$dtype": "ops"},
        {"$tensor": {"dtype": "load", "shape": [1], "data": "AAAA"}},
        {"$tensor": {"dtype": "float32", "shape": [10**12], "data": ""}},
        {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAAAA=="}},
        {"$tensor": {"dtype": "float32", "shape": [-1], "data": "AAAAAA=="}},
        {"$tensor": {"dtype": "float32", "shape": "x", "data": "AAAAAA=="}},
        {"$tensor": {"dtype": "float32", "shape": [1], "data": "*"}},
        {"$tensor": 3},
        {"$array": {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA=", "scalar": False}},
        {"$array": {"dtype": "O,i4", "shape": [1], "data": "AAAAAAAAAAAAAAAA", "scalar": False}},
        {"$array": {"dtype": ["O"], "shape": [1], "data": "AAAAAAAAAAA=", "scalar": False}},
        {"$array": {"dtype": "<f4", "shape": [10**12], "data": "", "scalar": False}},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$dict": [1]},
        {"$set": [[1]]},
        {"$range": [0, 1, 0]},
        {"$decimal": "x"},
        {"$date": "x"},
        {"$datetime": "x"},
        {"$timedelta": [10**30]},
        {"$uuid": "x"},
        {"$device": "nowhere"},
        {"$size": [-1]},
        {"$enum": "a.B"},
        {"$dataclass": "a.B", "fields": 3},
        {"$repr": "x"},
        {"$unknown": 1},
    ],
)
def test_a_value_of_another_notation_is_refused(tmp_path, value):
    """A value that nothing here writes is refused with its line; no name of torch and no memory comes of it."""
    path = tmp_path / "one.spool.jsonl"
    path.write_text(_lines({**_log(1), "values": {"x": value}}))
    with pytest.raises(TrackerError, match=r"one\.spool\.jsonl is damaged; line 2 is .*: not the notation"):
        spool.read(path)


def test_damage_anywhere_is_read_or_refused(tmp_path):
    """A byte changed, lost or doubled anywhere in a file is read as a value, or refused by name."""
    path = tmp_path / "one.spool.jsonl"
    images = {"only": ["a"], "method": "log_images", "args": {"$tuple": [{"x": 1}]}, "kwargs": {}}
    values = {"x": {"$tensor": {"dtype": "float32", "shape": [1], "data": "AAAAAA=="}}, "y": {"$float": "nan"}}
    marks = [{"kind": "sent", "tracker": "a", "seq": [1]}, {"kind": "state", "tracker": "a", "state": {"id": 1}}]
    whole = _lines({**_log(1), "values": values}, _log(2), {"kind": "call", "seq": 3, **images}, *marks).encode()
    choose = random.Random(0)
    refusals = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            place = choose.randrange(len(content))
            other = choose.choices(b'0"{}[],:$\n-9xe\xff', k=choose.randint(0, 2))
            content[place : place + choose.randint(0, 2)] = bytes(other)
        path.write_bytes(content)
        with contextlib.suppress(TrackerError):
            spool.read(path).unsent("a")
            continue
        refusals += 1
    assert 0 < refusals < 400


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_not_a_file_is_refused(tmp_path, kind):
    """A folder, pipe or broken link with the name of a spool file is refused, and nobody waits for it."""
    path = tmp_path / "one.spool.jsonl"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to nothing": lambda: path.symlink_to("none")}[kind]()
    assert spool.find(tmp_path) == [path]
    with pytest.raises(TrackerError, match=r"one\.spool\.jsonl (is not a file|cannot be read)"):
        spool.read(path)


def test_the_notation_stays(tmp_path):
    """A file that was written out by hand, as files are written today, is read."""
    path = tmp_path / "one.spool.jsonl"
    path.write_text(
        '{"kind":"run","version":1,"run_id":"r","project":"p","trackers":["a"],"started":1.5,"host":"h","pid":7}\n'
        '{"kind":"state","tracker":"a","state":{"id":"x"}}\n'
        '{"kind":"config","seq":1,"only":null,"values":{"d":{"$dtype":"bfloat16"},"t":{"$tuple":[1,{"$path":"/x"}]}}}\n'
        '{"kind":"log","seq":2,"only":null,"step":null,"filled":0,"time":1.5,"values":{"l":{"$tensor":{"dtype":"float32",'
        '"shape":[],"data":"AACAPw=="}},"n":{"$float":"nan"}},"kwargs":{"a":{"extra":1}}}\n'
        '{"kind":"call","seq":3,"only":["a"],"method":"log_images","args":{"$tuple":[{"x":{"$array":{"dtype":"<i8",'
        '"shape":[1],"data":"BwAAAAAAAAA=","scalar":false}}}]},"kwargs":{"step":2}}\n'
        '{"kind":"log","seq":4,"only":null,"step":4,"filled":4,"values":{},"kwargs":{}}\n'
        '{"kind":"note of a later version","seq":"any"}\n'
        '{"kind":"failed","tracker":"a","seq":2,"error":"E: no"}\n'
        '{"kind":"resumed","run_id":"s"}\n{"kind":"end","time":2.0}\n'
    )
    found = spool.read(path)
    config, log, call, later = found.unsent("a")
    assert (found.run_id, found.project, found.pid, found.ended) == ("s", "p", 7, True)
    assert found.states == {"a": {"id": "x"}}
    assert found.errors == {"a": "E: no"}
    assert config["values"]["d"] is torch.bfloat16
    assert (log["step"], log["filled"], log["values"]["l"].item(), log["kwargs"]) == (None, 0, 1.0, {"a": {"extra": 1}})
    assert (call["method"], call["args"][0]["x"].tolist(), call["kwargs"]) == ("log_images", [7], {"step": 2})
    assert (later["filled"], later["only"]) == (4, None)


@pytest.mark.parametrize("tail", ['{"kind":"log","seq":2,"val', json.dumps(_log(2))])
def test_a_cut_line_does_not_spoil_the_next(tmp_path, tail):
    """What is written to a file whose last line was cut off stands on a line of its own; a whole line stays."""
    path = tmp_path / "one.spool.jsonl"
    path.write_text(_lines(_log(1)) + tail)
    _write(path, {"kind": "sent", "tracker": "a", "seq": [1]})
    found = spool.read(path)
    assert found.sent == {"a": {1}}
    assert [entry["seq"] for entry in found.entries] == ([1] if tail.endswith("val") else [1, 2])


def test_numbers_beyond_what_json_reads(tmp_path):
    """An integer of more digits than Python reads is written and read exactly."""
    path = tmp_path / "one.spool.jsonl"
    _write(path, HEAD, {**_log(1), "values": {"x": encode(3**20_000)}})
    assert spool.read(path).entries[0]["values"]["x"] == 3**20_000
