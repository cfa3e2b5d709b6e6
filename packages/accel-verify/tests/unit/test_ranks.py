"""Ranks that a command starts by itself: none outlives it, and the one that failed by itself is named."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from accel_testing import limits
from accel_verify.ranks import RanksEnded, rank_variables, run_ranks

FOREVER = "import time; time.sleep(3600)"


def run(place: Path, *programs: str, timeout: float = 30.0, grace: float | None = None) -> RanksEnded:
    """Run one short program on each rank."""
    place.mkdir(exist_ok=True)
    commands = [[sys.executable, "-S", "-E", "-c", program] for program in programs]
    return run_ranks(commands, [dict(os.environ)] * len(programs), place, timeout, grace)


def test_ranks_that_end_well(tmp_path: Path) -> None:
    """Nobody failed, and what each printed lies in its file."""
    ended = run(tmp_path, "print('one')", "print('two')\nprint('more')")
    assert (ended.codes, ended.failed, ended.timed_out) == ((0, 0), None, False)
    assert (ended.tail(0), ended.tail(1, 1)) == ("one", "more")


def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    """The rank that failed by itself is named, not the one that was killed for it."""
    ended = run(tmp_path, FOREVER, "raise SystemExit(3)")
    assert (ended.codes, ended.failed, ended.timed_out) == ((-9, 3), 1, False)


@pytest.mark.parametrize("session", [False, True])
def test_time_runs_out_for_a_rank_and_what_it_started(tmp_path: Path, session: bool) -> None:
    """Its child is killed with it, also one that left the rank's session."""
    started = f"[sys.executable, '-S', '-c', {FOREVER!r}], start_new_session={session}"
    child = f"import subprocess, sys; c = subprocess.Popen({started}); print(c.pid)"
    ended = run(tmp_path, f"{child}; sys.stdout.flush(); c.wait()", timeout=0.5)
    assert ended.timed_out
    stat = Path("/proc") / ended.tail(0) / "stat"
    limits.wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")
    assert not stat.exists() or stat.read_text().split()[2] == "Z", "the child lives on"


def test_others_have_little_time_once_one_has_ended_well(tmp_path: Path) -> None:
    """A rank that waits for one that is gone would wait for ever; the signal that ends it asks for its stacks."""
    ended = run(tmp_path, "pass", FOREVER, grace=0.2)
    assert (ended.codes, ended.timed_out) == ((0, -signal.SIGABRT), True)


def test_variables_of_ranks() -> None:
    """Each has its number and the place where they meet; a single process has nothing to find."""
    assert rank_variables(0, 1, 5) == {}
    found = rank_variables(1, 2, 29500)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "2", "29500")


def test_a_program_that_cannot_be_started_leaves_nobody(tmp_path: Path) -> None:
    """Those that were started are killed."""
    place = tmp_path / "ranks"
    place.mkdir()
    mark = place / "mark"
    first = [sys.executable, "-S", "-c", f"import time; time.sleep(1); open({str(mark)!r}, 'w')"]
    with pytest.raises(FileNotFoundError):
        run_ranks([first, [str(tmp_path / "none")]], [{}, {}], place, 9.0)
    time.sleep(1.2)
    assert not mark.exists()
