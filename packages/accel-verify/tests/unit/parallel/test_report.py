"""What a person and a program are shown of a verification."""

from __future__ import annotations

import json

import pytest

from accel_verify.parallel.comparison import Finding, Largest, Tolerance
from accel_verify.parallel.report import Numbers, Report, Verdict, print_report

NUMBERS = Numbers([2.5, float("nan")], [1.0, 2.0], [3.0, 4.0], [300 << 20, 310 << 20])
NONE = Numbers([], [], [], [])
TOLERANCE = Tolerance("float32", 1e-5, 1e-4, 1e-2, 3e-2, 1e-5)
FINDINGS = [Finding(1, "gradient", f"`{number}`", "it is wrong", 0.5) for number in range(7)]
REPORT = Report(
    "train.py",
    2,
    TOLERANCE,
    {2: NUMBERS},
    [
        Verdict("dp2", 2, 2, NUMBERS, "equal", "", largest=Largest(1e-7, "head.bias"), note="KeyError: 'late'"),
        Verdict("fsdp2", 2, 2, NUMBERS, "differs", "", FINDINGS),
        Verdict("hsdp2x2", 4, 2, NONE, "not comparable", "rank 0 draws at train.py:3", FINDINGS[:1]),
        Verdict("zero3", 2, 2, NONE, "refused", "it is not installed"),
        Verdict("zero2", 2, 2, NONE, "failed", "rank 1: boom", log="Traceback\nboom"),
    ],
)


def test_a_person_sees_a_table_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of one process once, of each layout, then what differs first and what follows."""
    print_report(REPORT, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["one", "process,"], ["2", "nan"]]
    assert lines[4].split() == ["dp2", "1", "2.5", "1", "3", "310", "MiB"]
    assert lines[9].split() == ["zero3", "-", "-", "-", "-", "-"]
    assert lines[12:] == [
        "dp2 equals one process",
        "  largest difference of weights: 1e-07 in head.bias",
        "  after the last step, the script raised KeyError: 'late'",
        "fsdp2 differs: step 1, gradient of `0`: it is wrong",
        *[f"  then step 1, gradient of `{number}`: it is wrong" for number in range(1, 5)],
        "  and 2 more; --json shows all",
        "hsdp2x2 is not comparable: rank 0 draws at train.py:3",
        "  then step 1, gradient of `0`: it is wrong",
        "zero3 is refused: it is not installed",
        "zero2 failed: rank 1: boom",
        "  | Traceback",
        "  | boom",
    ]


def test_a_program_gets_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid JSON, with numbers that JSON does not have as words."""
    print_report(REPORT, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["steps"], found["one_process"]["2"]["loss"]) == (False, 2, [2.5, "nan"])
    assert [verdict["state"] for verdict in found["verdicts"]] == [
        "equal",
        "differs",
        "not comparable",
        "refused",
        "failed",
    ]
    assert len(found["verdicts"][1]["findings"]) == 7
    assert found["verdicts"][0]["largest"] == {"value": 1e-7, "where": "head.bias"}
