"""`accel verify-parallel` with wrong arguments: named, with status 2, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.cli import main
from accel_verify.parallel.layouts import requested_layout
from accel_verify.parallel.run import VerifyRequest, _checked, _recorded, verify_parallel
from accel_verify.ranks import RanksEnded


def trainer() -> None:
    """Stand for a training function."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "fdsp2", "train.py"], "fsdp2"),
        (["--layouts", "dp2", "--cpu", "none.py"], "The script does not exist; got 'none.py'"),
        (["--layouts", "dp2", "--cpu", "none.py:main"], "The script does not exist; got 'none.py'"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unknown layout with the nearest, and a script that is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["verify-parallel", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "dp2", "--steps", "0", "train.py"], "got '0'. Give it a whole number above 0."),
        (["--layout", "dp2", "train.py"], "--layouts"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No steps, and a misspelled option."""
    with pytest.raises(SystemExit) as ended:
        main(["verify-parallel", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_function_that_ranks_cannot_find_is_refused() -> None:
    """A function inside another one has no name in its module; one of the module is its file and name."""

    def inner() -> None:
        trainer()

    with pytest.raises(ConfigurationError, match=r"found by its name; got '.*inner'. Define it at the top of a file."):
        verify_parallel(inner, ["dp2"], cpu=True)
    assert _checked(trainer) == f"{__file__}:trainer"


def test_ranks_compute_without_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's default, convolutions of a GPU round to 10 bits, which differs by more than sums in another order."""
    seen: list[str] = []

    def ranks(_: object, environments: list[dict[str, str]], *__: object) -> RanksEnded:
        seen.extend(each["NVIDIA_TF32_OVERRIDE"] for each in environments)
        return RanksEnded((0, 0), False, ())

    monkeypatch.setattr("accel_verify.parallel.run.run_ranks", ranks)
    layout = requested_layout("dp2")
    _recorded(VerifyRequest("train.py", (), 1, ("--cpu",), False, 1.0, tmp_path), "dp2", layout.ranks, 0, layout.words)
    assert seen == ["0", "0"]
