"""Replicas that are killed at random, by the dozen: what benchmarks/replicas.py measures is also right."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_testing import limits, requires

pytest.importorskip("torchft", reason="torchft is not installed")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "replicas.py"


@pytest.mark.full("fuzz by the hundred")
def test_random_kills_lose_and_repeat_no_sample() -> None:
    """None of those that were not killed starts again, no sample is lost or repeated, and all end with equal weights.

    ACCEL_KILLS sets how many replicas are killed, 40 by default, which take three minutes.
    """
    kills = os.environ.get("ACCEL_KILLS", "40")
    command = [sys.executable, str(SCRIPT), "--only", "kills", "--kills", kills, "--minutes", "60"]
    done = limits.run(command, quiet=3600, check=True)
    rows = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in done.stdout.splitlines())}
    found = {re.sub(r"\d+", "N", name): value for name, value in rows.items()}
    assert found["N kills in N runs: survivors restarted"] == "0", done.stderr
    assert found["runs that failed"] == "0", done.stderr
    assert found["samples lost; repeated"] == "0; 0", done.stderr
    equal, runs = found["runs that ended with bit-equal weights (N replicas)"].split(" of ")
    assert equal == runs, done.stderr


def ranks_of(replica: int, folder: Path) -> list[int]:
    """Return the processes of a replica that run the script, and not those that start it."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = ((each / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if str(folder).encode() in words and b"accel_launch" not in words:
                found += [int(each.name)] * (f"ACCEL_REPLICA={replica}".encode() in variables)
    return found


def digits(folder: Path, *flags: str, meanwhile: Callable[[], None] = lambda: None) -> tuple[float, str]:
    """Train examples/train_digits.py, as it is; return the accuracy that it prints, and what the launcher says."""
    script = [str(ROOT / "examples" / "train_digits.py"), "--folder", str(folder)]
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", *flags, *script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            meanwhile()
        except BaseException:
            run.terminate()
            raise
        out, errors = limits.communicate(run, quiet=60)
    assert run.returncode == 0, errors
    found = re.search(r"test accuracy +(\S+)", out)
    assert found is not None, out
    return float(found[1]), errors


@requires("sklearn")
@pytest.mark.full("a whole training")
def test_digits_reach_their_accuracy_after_a_replica_returns(tmp_path: Path) -> None:
    """One of three replicas is killed when the state of mid-way is saved; three ranks that nobody kills do no better.

    With a minimum of three, the others wait for it, so that it is there again before the end.
    """

    def kill() -> None:
        assert limits.wait_until((tmp_path / "killed" / "state").is_dir, quiet=60)
        (rank,) = ranks_of(1, tmp_path / "killed")
        os.kill(rank, signal.SIGKILL)

    flags = ("-n", "1", "--replicas", "3", "--min-replicas", "3")
    accuracy, said = digits(tmp_path / "killed", *flags, meanwhile=kill)
    assert "replica 1 ended: killed by SIGKILL; it starts again at once" in said
    assert "3 of 3 replicas came to the end of the script" in said
    wanted, _ = digits(tmp_path / "whole", "-n", "3")
    assert abs(accuracy - wanted) <= 1.5 / 360, (accuracy, wanted)  # one of 360 digits, as it is rounded
