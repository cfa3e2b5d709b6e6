"""What processes print is passed on, kept and remembered; ended streams are let go."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_launch.supervision.logs import LogFolder
from accel_launch.supervision.streams import Streams
from accel_launch.supervision.traceback_hold import TracebackHold, seconds_without_core
from accel_testing import limits


def run(streams: Streams, rank: int, code: str, mark: str = "") -> None:
    """Run a process of a rank to its end."""
    log = streams.add_rank(rank, rank)
    ends = {name: streams.follow(log, name, mark=mark).child_end for name in ("stdout", "stderr")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=ends["stdout"], stderr=ends["stderr"])
    streams.started(log, process.pid)
    process.wait()
    limits.wait_until(lambda: log.ended_at is not None)


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


UNCAUGHT = "import sys, time; sys.stderr.write('[rank0]: Traceback (most recent call last):\\n[rank0]: one\\n')"
RAISED = (
    "import sys, time; sys.stderr.write('before\\nTraceback (most recent call last):\\n  one\\n'); sys.stderr.flush()"
)


def test_a_traceback_is_held_until_its_outcome_is_known(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process prints from a traceback on is kept where it ends by it, and passed on where it goes on."""
    streams = Streams(hold=True)
    for rank in range(2):
        run(streams, rank, RAISED)
    monkeypatch.setattr("accel_launch.supervision.traceback_hold._HOLD_S", 0.05)
    run(streams, 2, f"{RAISED}; time.sleep(0.5); sys.stderr.write('after\\n')")
    assert capfd.readouterr().err == "before\n" * 3 + "Traceback (most recent call last):\n  one\nafter\n"
    streams.stop()
    assert streams.take_held(streams.ranks[0]) == b"Traceback (most recent call last):\n  one\n"
    streams.release(streams.ranks[0])
    assert capfd.readouterr().err == ""
    streams.release(streams.ranks[1])
    assert capfd.readouterr().err == "Traceback (most recent call last):\n  one\n"


def test_marked_tracebacks_are_held_without_their_marks(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines get the rank's mark when they are passed on, also the last one without an end, and a report gets none."""
    streams = Streams(hold=True)
    run(streams, 0, RAISED, mark="[r0]: ")
    run(streams, 1, f"{RAISED}; sys.stderr.write('no end')", mark="[r1]: ")
    streams.stop()
    assert capfd.readouterr().err == "[r0]: before\n[r1]: before\n"
    assert streams.take_held(streams.ranks[0]) == b"Traceback (most recent call last):\n  one\n"
    streams.release(streams.ranks[1])
    held = ["[r1]: Traceback (most recent call last):", "[r1]:   one", "[r1]: no end"]
    assert capfd.readouterr().err.splitlines() == held


@pytest.mark.slow
def test_an_uncaught_traceback_waits_for_the_process_to_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch prints for an uncaught exception is held, however long its process takes to end, unless it hangs."""
    monkeypatch.setattr("accel_launch.supervision.traceback_hold._HOLD_S", 0.05)
    streams = Streams(hold=True)
    run(streams, 0, f"{UNCAUGHT}; sys.stderr.flush(); time.sleep(0.5)")
    run(streams, 1, f"{RAISED}; {UNCAUGHT.partition('; ')[2]}; sys.stderr.flush(); time.sleep(0.5)")
    assert capfd.readouterr().err == "before\n"
    monkeypatch.setattr("accel_launch.supervision.traceback_hold._UNCAUGHT_HOLD_S", 0.05)
    run(streams, 2, f"{UNCAUGHT}; sys.stderr.flush(); time.sleep(0.5)")
    assert capfd.readouterr().err.startswith("[rank0]: Traceback"), "a process that hangs shows why"
    streams.stop()
    assert streams.take_held(streams.ranks[0]).endswith(b"[rank0]: one\n")


def test_time_without_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that others keep from ending gets as much time of its own as one that is alone on its machine."""
    hold = TracebackHold()
    assert hold.add(b"before\nTraceback (most recent call last):\n", os.getpid()) == b"before\n"
    alone = hold.remaining(os.getpid())
    monkeypatch.setattr("accel_launch.supervision.traceback_hold.seconds_without_core", lambda pid: 1e6)
    assert hold.remaining(os.getpid()) > alone + 1e5


def test_processes_on_one_core_wait_for_it() -> None:
    """The system's count of waiting grows for processes that share a core, and is 0 for one that is not there."""
    core = min(os.sched_getaffinity(0))
    code = f"import os, time\nos.sched_setaffinity(0, [{core}])\nend = time.monotonic() + 0.4\n"
    code += "while time.monotonic() < end: pass\nprint(flush=True)\ninput()"
    busy = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    assert [process.stdout.readline() for process in busy if process.stdout] == [b"\n"] * 2
    assert all(seconds_without_core(process.pid) > 0.02 for process in busy)
    for process in busy:
        process.communicate(b"\n")
    assert seconds_without_core(2**22 + 1) == 0.0
