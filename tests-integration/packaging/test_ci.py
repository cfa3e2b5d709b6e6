"""The last words of a CI run: what was skipped and why, then pytest's own summary."""

import subprocess
import sys
from pathlib import Path

import pytest

SUMMARIES = Path(__file__).resolve().parents[2] / ".ci" / "summaries.py"
TESTS = """nox > Running session tests
=========================== short test summary info ============================
SKIPPED [1] packages/accel-core/tests/devices/test_cuda.py:9: needs a cuda device, none on this machine
================== 500 passed, 1 skipped in 61.23s (0:01:01) ===================
nox > Session tests was successful in a minute.
"""
INTEGRATION = """\x1b[36mnox > Running session integration\x1b[0m
FAILED tests-integration/faults/test_kill.py::test_kill - assert 1 == 2
\x1b[31m==================== 1 failed, 11 passed in 4.56s =====================\x1b[0m
nox > Session integration failed.
"""
CLOSING = "nox > Ran 2 sessions:\nnox > * tests: success, took a minute\nnox > * integration: failed, took 4 seconds\n"


def shown(log: str, tmp_path: Path) -> list[str]:
    """Return the lines that the script prints for a log."""
    (tmp_path / "log").write_text(log)
    command = [sys.executable, str(SUMMARIES), str(tmp_path / "log")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_last_line_is_the_summary_of_all_packages_tests(tmp_path: Path) -> None:
    """Where all passed, pytest's line about the session `tests` comes last; before it, what was skipped and why."""
    passed = INTEGRATION.replace("1 failed, 11 passed", "11 passed").replace("FAILED", "ignored")
    assert shown(TESTS + passed + CLOSING, tmp_path)[-1] == TESTS.splitlines()[3]
    assert any("needs a cuda device" in line for line in shown(TESTS, tmp_path))


@pytest.mark.parametrize("log", [TESTS + INTEGRATION + CLOSING, INTEGRATION + TESTS + CLOSING])
def test_a_failure_comes_last(log: str, tmp_path: Path) -> None:
    """The session that failed closes the output, whatever its place in the run, with the names of its failures."""
    lines = shown(log, tmp_path)
    assert "1 failed, 11 passed" in lines[-1]
    assert lines[-2].startswith("FAILED tests-integration/faults/test_kill.py")
