"""The testing kit itself: ranks, failures, skips."""

import os
from pathlib import Path

import pytest

from accel_core.errors import TorchVersionError
from accel_core.process.world import ensure
from accel_testing import limits, requires, world
from accel_testing.world import run


@pytest.mark.slow
@world(2)
def test_body_runs_on_every_rank(tmp_path: Path) -> None:
    """Each rank sees itself, its size and the same folder."""
    import torch.distributed as dist

    here = ensure()
    assert (here.size, here.backend, here.device.type) == (2, "gloo", "cpu")
    (tmp_path / f"rank-{here.rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]


def _fails_on_rank_one() -> None:
    if ensure().rank == 1:
        raise ValueError("only here")


def _hangs_on_rank_zero() -> None:
    import threading

    if os.environ["RANK"] == "0":
        threading.Event().wait()


def test_failure_of_one_rank_is_shown() -> None:
    """The message names the rank and holds its traceback."""
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 failed.*ValueError: only here"):
        run(_fails_on_rank_one, 2)


@pytest.mark.slow
def test_hang_of_one_rank_shows_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never ends is ended, and the place where it stood is shown."""
    monkeypatch.setattr(limits, "_SHORTEST", 0.8)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 did not end.*_hangs_on_rank_zero"):
        run(_hangs_on_rank_zero, 2, quiet=0.05)


def _aborts_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.abort()


def test_death_of_one_rank_shows_its_stack() -> None:
    """A rank that a signal ends, as a damaged heap does, says where it stood."""
    ended = r"(?s)rank 1 failed:\nthe process ended with exit code -6.*_aborts_on_rank_one"
    with pytest.raises(pytest.fail.Exception, match=ended):
        run(_aborts_on_rank_one, 2)


@pytest.mark.parametrize("value", [1, "two"])
@world(2)
def test_parameters_reach_every_rank(value: object) -> None:
    """A parametrized body gets its parameters on each rank."""
    assert value in (1, "two")


def _skips() -> None:
    pytest.skip("found out on the rank")


def test_skip_on_a_rank_skips_the_test() -> None:
    """A body may find out on its ranks that it cannot run."""
    with pytest.raises(pytest.skip.Exception, match="found out on the rank"):
        run(_skips, 2)


def _asks_for_a_later_torch() -> None:
    raise TorchVersionError("Time travel needs a later torch; got an old one.")


def test_what_torch_lacks_skips_the_test() -> None:
    """Ranks that ask for something that the installed torch lacks skip the test, with what accel says."""
    with pytest.raises(pytest.skip.Exception, match=r"Time travel needs a later torch; got"):
        run(_asks_for_a_later_torch, 2)


@pytest.mark.parametrize(
    ("need", "reason"), [("library:surely_not_installed", "surely_not_installed"), ("torch:99.1", "needs torch 99.1")]
)
def test_requirement_that_is_missing_gives_its_reason(need: str, reason: str) -> None:
    """The mark skips, and says what is missing."""
    mark = requires(need).mark
    assert mark.args == (True,)
    assert reason in mark.kwargs["reason"]
    assert requires("torch:2.6").mark.args == (False,)
