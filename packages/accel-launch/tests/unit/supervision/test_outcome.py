"""How a failure is understood from what processes printed and how they ended."""

import signal
from pathlib import Path

import pytest

from accel_core.checkpoint.preemption import EXIT_CODE
from accel_launch.supervision.outcome import (
    ExitOutcome,
    first_failure,
    last_traceback,
    outcomes,
    shell_status,
    want_restart,
)
from accel_launch.supervision.report import (
    failure_record,
    report_card,
    report_failure,
    report_stacks,
)
from accel_launch.supervision.streams import RankLog

PLAIN = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: one\n'
CHAIN = (
    PLAIN
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + "Traceback (most recent call last):\n  File \"b.py\", line 2\nKeyError: 'two'\n"
)

MARKED_CHAIN = "\n".join(f"[rank0]: {line}" if line else "" for line in CHAIN.rstrip("\n").split("\n")) + "\n"
"""As torch's `sys.excepthook` prints it."""


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("log\n" + PLAIN, PLAIN),
        ("[rank1]: " + PLAIN, "[rank1]: " + PLAIN),
        (PLAIN + "handled\n" + PLAIN.replace("one", "last"), PLAIN.replace("one", "last")),
        ("log\n" + CHAIN, CHAIN),
        ("log\n" + MARKED_CHAIN, MARKED_CHAIN),
        (PLAIN + "terminate called without an active exception\n", PLAIN),
    ],
)
def test_last_traceback_is_found_with_its_chain(tail: str, expected: str) -> None:
    """The last traceback is shown, with the exceptions that led to it."""
    assert last_traceback(tail.encode()) == expected.strip("\n")


@pytest.mark.parametrize(
    ("ended", "raised", "status"),
    [
        (100.5, 100.1, 1),  # it raised, and the rank that lost its partner ended earlier
        (100.1, 3.0, -signal.SIGKILL),  # counts from its end, whatever it had printed before
        (100.6, 3.0, -signal.SIGKILL),  # the system was slow to say so; the launcher waits for seconds before it kills
    ],
)
def test_rank_that_others_failed_because_of_is_the_first(ended: float, raised: float, status: int) -> None:
    """The rank that raised or was killed counts before the one that lost its partner, even if it ended later."""
    lost = RankLog(0, 0, 10, ended_at=100.4, traceback_at=100.3)
    cause = RankLog(1, 1, 11, ended_at=ended, traceback_at=raised)
    first = first_failure(outcomes({0: lost, 1: cause}, {0: 1, 1: status}))
    assert first is not None
    assert (first.rank, first.how) == (1, "exit code 1" if status == 1 else "killed by SIGKILL")


def test_killed_for_memory_is_said() -> None:
    """SIGKILL while the system's count of memory kills went up is called so."""
    log = RankLog(0, 0, 10, ended_at=1.0)
    (ending,) = outcomes({0: log}, {0: -signal.SIGKILL}, out_of_memory=True)
    assert ending.how == "killed by the system because memory ran out (SIGKILL)"


def test_stopped_ranks_are_no_failures() -> None:
    """Ranks that the launcher ended do not count; a shell's status is 128 plus the signal."""
    stopped = ExitOutcome(0, 0, 1, -15, stopped=True, failed_at=1.0)
    assert first_failure([stopped]) is None
    assert (shell_status(-9), shell_status(3)) == (137, 3)


def test_traceback_across_two_pieces_is_noticed() -> None:
    """A traceback's first line that arrives in two pieces is noticed once."""
    log = RankLog(0, 0)
    log.keep(b"x\nTraceback (most rec")
    assert log.traceback_at is None
    log.keep(b"ent call last):\n")
    assert log.traceback_at is not None


@pytest.mark.parametrize(("statuses", "again"), [([75, 75], True), ([75, -9], False), ([75, 0], False), ([], False)])
def test_a_run_is_to_be_started_again_when_every_rank_says_so(
    statuses: list[int], again: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code that preempted ranks leave with counts only if all have it, and a person is told what to do."""
    assert EXIT_CODE == 75
    logs = {rank: RankLog(rank, rank, 10 + rank, ended_at=1.0) for rank in range(len(statuses))}
    ended = outcomes(logs, dict(enumerate(statuses)))
    assert want_restart(ended) is again
    record = failure_record(ended, run_id="x", command=["a.py"], seconds=1.0, reason="failure")
    report_failure(ended, logs, record, "", log_dir=tmp_path)
    assert ("start the run again" in capsys.readouterr().err) is again


def test_stacks_name_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Stacks are shown below the number of the rank, without the heading of a crash."""
    report_stacks(3, b'Fatal Python error: Aborted\n\nCurrent thread 0x1:\n  File "a.py"\n\nExtension modules: a\n')
    assert capsys.readouterr().err == '\nStacks of rank 3:\nCurrent thread 0x1:\n  File "a.py"\n'


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ({"samples": 1_234_567}, "1,234,567 samples/s on all ranks together, 0% of the time waiting for data\n"),
        ({"samples": 154}, "154 samples/s"),
        ({"samples": 0.5}, "0.50 samples/s"),
        ({"samples": 10, "mfu": 0.412}, "of the time waiting for data, 41.2% of peak FLOP/s\n"),
    ],
)
def test_the_speed_of_a_run_is_written_out(
    found: dict[str, float], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fast run has no exponent, a slow one two decimals; the share of the peak that a meter found comes after."""
    report_card({"seconds": 1.0, **found}, 2.0, "train.py")
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize(
    ("defines", "given", "shown"),
    [
        ("add_argument('--resume_from_checkpoint')", "", " --resume_from_checkpoint new"),
        (
            "add_argument('--resume_from_checkpoint')",
            "--resume_from_checkpoint old -n 1",
            " --resume_from_checkpoint new -n 1",
        ),
        (
            "add_argument('--resume-from-checkpoint')",
            "--resume-from-checkpoint=old -n 1",
            " --resume-from-checkpoint new -n 1",
        ),
        ("add_argument('--resume')", "--resume old", " --resume new"),
        ("add_argument('--resume', action='store_true')", "-n 1", " -n 1 --resume"),
        ("option('--resume', is_flag=True)", "--resume -n 1", " --resume -n 1"),
        ("accelerator.load_state()", "-n 1", " -n 1"),
        ("print('it does not --resume')", "-n 1", None),
    ],
)
def test_the_line_that_resumes_names_the_newest_checkpoint(
    defines: str,
    given: str,
    shown: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It replaces the argument of a run that was resumed itself; a script that does not resume has no such line."""
    script = tmp_path / "train.py"
    script.write_text(defines)
    monkeypatch.setattr("sys.argv", ["/bin/accel", "launch", str(script), *given.split()])
    report_card({"checkpoint": "new"}, 2.0, str(script))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == ("  checkpoint  new" if shown is None else f"  resume      accel launch {script}{shown}")
