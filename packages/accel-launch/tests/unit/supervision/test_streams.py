"""What processes print is passed on, kept and remembered; ended streams are let go."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_launch.supervision.logs import LogFolder
from accel_launch.supervision.streams import Streams


def run(streams: Streams, rank: int, code: str) -> None:
    """Run a process of a rank to its end."""
    log = streams.add_rank(rank, rank)
    ends = {name: streams.follow(log, name).child_end for name in ("stdout", "stderr")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=ends["stdout"], stderr=ends["stderr"])
    streams.started(log, process.pid)
    process.wait()
    deadline = time.monotonic() + 5
    while log.ended_at is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_streams_are_passed_on_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both streams reach the launcher's own, the folder, and the rank's memory."""
    streams = Streams(LogFolder(tmp_path / "logs"))
    run(streams, 0, "import sys; print('out'); sys.stderr.write('err without end')")
    streams.stop()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out\n", "err without end")
    assert (tmp_path / "logs" / "rank0.stdout.log").read_text() == "out\n"
    assert b"err without end" in streams.ranks[0].tail


def test_ended_streams_are_let_go(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Descriptors of an ended attempt are not touched again, whoever has their numbers now."""
    streams = Streams()
    for attempt in range(3):
        run(streams, 0, f"print({attempt})")
    time.sleep(0.2)
    others = [os.pipe() for _ in range(6)]
    for _, write_end in others:
        os.write(write_end, b"not yours")
    streams.stop()
    assert [os.read(read_end, 20) for read_end, _ in others] == [b"not yours"] * 6
    for pair in others:
        for descriptor in pair:
            os.close(descriptor)
    assert capfd.readouterr().out == "0\n1\n2\n"


def test_large_output_is_remembered_by_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a long stream the end is remembered, and all of it is passed on."""
    streams = Streams()
    run(streams, 0, "import sys\nfor i in range(40000): sys.stderr.write('%099d\\n' % i)")
    streams.stop()
    assert len(capfd.readouterr().err) == 4_000_000
    assert len(streams.ranks[0].tail) <= 2 << 20
    assert bytes(streams.ranks[0].tail).endswith(b"39999\n")


RAISED = (
    "import sys, time; sys.stderr.write('before\\nTraceback (most recent call last):\\n  one\\n'); sys.stderr.flush()"
)


def test_a_traceback_is_held_back_until_it_is_known_what_becomes_of_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process prints from a traceback on is kept where it ends by it, and passed on where it goes on."""
    streams = Streams(hold=True)
    for rank in range(2):
        run(streams, rank, RAISED)
    monkeypatch.setattr("accel_launch.supervision.streams._HOLD_S", 0.05)
    run(streams, 2, f"{RAISED}; time.sleep(0.5); sys.stderr.write('after\\n')")
    assert capfd.readouterr().err == "before\n" * 3 + "Traceback (most recent call last):\n  one\nafter\n"
    streams.stop()
    assert streams.take_held(streams.ranks[0]) == b"Traceback (most recent call last):\n  one\n"
    streams.release(streams.ranks[0])
    assert capfd.readouterr().err == ""
    streams.release(streams.ranks[1])
    assert capfd.readouterr().err == "Traceback (most recent call last):\n  one\n"
