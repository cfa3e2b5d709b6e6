"""What forked ranks record of their exceptions."""

import multiprocessing
import resource
import signal
from pathlib import Path

import pytest

from accel_launch.launchers.forked import _Forked
from accel_testing import limits


def fail(rank: int, stopped: bool) -> None:
    """Raise; a rank that is stopped is killed by the kernel while its exception is recorded."""
    if stopped:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError(f"rank {rank}")


def test_file_of_a_stopped_rank_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed while its exception is recorded leaves half a file, and the others' files are read."""
    forked, context = _Forked(tmp_path), multiprocessing.get_context("fork")
    for rank, stopped in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        process = context.Process(target=forked.watched(fail), args=(rank, stopped))
        process.start()
        process.join(limits.limit())
        assert process.exitcode == (-signal.SIGXFSZ if stopped else 1)
    first = forked.first_exception()
    assert first is not None
    assert first[0] == 1
    assert "ValueError: rank 1" in first[1]
