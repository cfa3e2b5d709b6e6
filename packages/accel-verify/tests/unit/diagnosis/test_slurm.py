"""SLURM as a shell outside a cluster, a job and a step see it; tests/ranks of accel-launch have a real cluster."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_verify.diagnosis.examine import settings_of
from accel_verify.diagnosis.finding import DoctorFinding
from accel_verify.diagnosis.slurm import check_slurm

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "localhost,n[2-3]",
    "SLURM_STEP_NODELIST": "localhost,n[2-3]",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NODEID": "2",
}


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine with variables of SLURM, on a machine without its programs."""

    def examine(variables: dict[str, str]) -> list[DoctorFinding]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return list(check_slurm({**os.environ, "PATH": "/nonexistent"}, settings_of))

    return examine


def test_machine_without_slurm(findings) -> None:
    """Outside a job, missing programs are a problem, and the only finding."""
    assert [(each.state, each.what) for each in findings({})] == [("problem", "sbatch, srun, scontrol not on PATH")]


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="SLURM's programs are not installed")
def test_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without a controller are a problem, with what they say."""
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    programs, _ = check_slurm(os.environ, settings_of)
    assert (programs.state, "is DOWN" in programs.what) == ("problem", True), programs


def test_step_says_where_ranks_would_meet(findings) -> None:
    """In a step: this machine's number, the first node with its address and the port; programs may be missing there."""
    programs, place, meeting, given = findings({**STEP, "SLURM_STEP_GPUS": "0,1", "ACCEL_MAIN_PROCESS_PORT": "4711"})
    assert programs.state == "warning"
    assert place.what == "job 7, step 1: machine 2 of 3, on localhost,n[2-3]"
    assert meeting.what in [f"ranks would meet at localhost ({address}), port 4711" for address in ("127.0.0.1", "::1")]
    assert given.what.endswith(" and the GPUs 0,1")


def test_one_core_is_a_warning(findings) -> None:
    """A task that SLURM gave one core, as it does unless asked for more, is told how to ask."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        given = findings(STEP)[-1]
    finally:
        os.sched_setaffinity(0, cores)
    assert (given.state, given.what) == ("warning", "this task has 1 core and no GPU")
    assert "cpus-per-task" in given.remedy


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_NODELIST": "nohost.invalid,n2"}, "nohost.invalid, where ranks would meet, has no address; got "),
        ({"SLURM_STEP_NUM_TASKS": "12"}, "Under srun the launcher runs once on each machine; got 12 tasks"),
    ],
)
def test_step_in_which_no_run_would_start(findings, changed: dict[str, str], message: str) -> None:
    """A first node without an address, and several tasks on a machine, are problems."""
    assert any(each.state == "problem" and each.what.startswith(message) for each in findings({**STEP, **changed}))


def test_batch_script_is_told_to_use_srun(findings) -> None:
    """Outside srun a job has one shell, on its first node."""
    _, place, _ = findings({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert place.what.startswith("job 7 on n[1-2], outside srun; `srun accel launch")
