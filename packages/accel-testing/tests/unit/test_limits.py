"""Time limits that grow with the machine."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from accel_testing import limits

FOREVER = [sys.executable, "-S", "-c", "import time; print('begun', flush=True); time.sleep(3600)"]


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process measured."""
    monkeypatch.setattr(limits, "_slowest", 0.0)


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let the piece of work take so many times longer than on a quiet machine, one number after the other."""
    times: list[float] = []

    def clock() -> Iterator[float]:
        now = 0.0
        for factor in times:
            yield now
            now += factor * limits._QUIET
            yield now

    ticks = clock()
    monkeypatch.setattr(limits.time, "perf_counter", lambda: next(ticks))
    return times


def test_a_limit_is_ten_times_what_a_step_takes_here(needs: list[float]) -> None:
    """On a machine four times slower each limit is four times as long, and never below a minute."""
    needs += [4.0]
    assert limits.limit(30) == pytest.approx(4 * 10 * 30)
    assert limits.limit(0.1) == pytest.approx(4 * 60)


def test_a_fast_machine_gets_no_shorter_limits(needs: list[float]) -> None:
    """What the quiet machine has is the least."""
    needs += [0.5]
    assert limits.limit(6) == pytest.approx(60)


def test_a_deadline_moves_on_where_the_machine_became_slow(needs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is timed once more before a step is taken for hung."""
    needs += [1.0, 3.0, 3.0]
    now = 0.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    deadline = limits.Deadline(6)
    now = 61.0
    assert limits.Deadline(6).left == pytest.approx(60)
    assert not deadline.is_over
    assert deadline.left == pytest.approx(180 - 61)
    now = 181.0
    assert deadline.is_over


def test_a_program_that_hangs_is_killed_and_what_it_printed_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has its output."""
    monkeypatch.setattr(limits, "_SHORTEST", 0.5)
    with pytest.raises(subprocess.TimeoutExpired) as hung:
        limits.run(FOREVER, quiet=0.05)
    assert hung.value.output == "begun\n"


def test_a_program_that_fails_raises_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """As with subprocess.run; what it had printed is shown."""
    command = [sys.executable, "-S", "-c", "print('the cause'); raise SystemExit(3)"]
    assert limits.run(command).returncode == 3
    with pytest.raises(subprocess.CalledProcessError):
        limits.run(command, check=True)
    assert "failed, and had printed:\nthe cause\n" in capsys.readouterr().err
