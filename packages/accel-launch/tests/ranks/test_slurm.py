"""A real SLURM with two nodes: runs that are submitted, preempted, cut off from a node, interrupted."""

import functools
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from slurm_cluster import SlurmCluster, running, why_not

from accel_testing import limits

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples"
pytestmark = [
    pytest.mark.full("a whole training"),
    pytest.mark.skipif(bool(why_not()), reason=f"no SLURM here: {why_not()}"),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="needs the examples of the repository"),
]

SUM = """
import os, socket, sys
import torch
from accel_core.comm.collectives import reduce
from accel_core.process.world import destroy, ensure
here = ensure()
total = int(reduce(torch.tensor([here.rank + 1.0]), "sum"))
words = (here.rank, "of", here.size, total, socket.gethostname(), os.environ["MASTER_ADDR"])
sys.stdout.write(" ".join(map(str, words)) + "\\n")
destroy()
"""
LOOP = """
import pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(36000):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0 and step == 5:
        pathlib.Path("going").touch()
    time.sleep(0.1)
"""
RECORDING = f"""
import hashlib, os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import train_digits
asked, forward = train_digits.preemption.requested, train_digits.DigitNet.forward
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
seen = open("seen-" + os.environ["SLURM_JOB_ID"] + "-" + attempt + "-" + os.environ["RANK"], "w")
def slowly():
    if attempt == "0":
        time.sleep(float(os.environ.get("PAUSE", "0")))  # so that the time limit comes before the end
    return asked()
def recording(model, images):
    if model.training:
        seen.writelines(hashlib.sha256(image.numpy().tobytes()).hexdigest() + "\\n" for image in images)
    return forward(model, images)
train_digits.preemption.requested, train_digits.DigitNet.forward = slowly, recording
train_digits.main()
"""
LAUNCH = ["-m", "accel_launch", "launch"]
SUBMIT = [*LAUNCH, "--launcher", "slurm", "--machines", "2", "--processes-per-machine", "2", "--cpu"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Start a controller and two nodes."""
    with running() as found:
        yield found


class Login:
    """The login node of the cluster, with a folder that all nodes see."""

    def __init__(self, cluster: SlurmCluster, folder: Path, variables: dict[str, str]) -> None:
        self.cluster, self.folder = cluster, folder
        # Two machines write to one log, each in the middle of the characters of the other's progress bar.
        self._settings: dict[str, Any] = {"cwd": folder, "env": cluster.environment(variables), "errors": "replace"}

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start a program with its outputs together."""
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # What runs in the background ignores SIGINT, and so would all that it starts.
        restore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(self.cluster.words("login", *words), preexec_fn=restore, **pipes, **self._settings)

    def run(self, *words: str, quiet: float = 30, status: int | None = 0) -> str:
        """Run a program, which ends with a status unless it is None, and return its outputs."""
        process = self.start(*words)
        output, _ = limits.communicate(process, quiet=quiet)
        assert status in (None, process.returncode), output
        return output

    def empties(self) -> None:
        """Wait until no job is left."""
        assert limits.wait_until(lambda: not self.run("squeue", "--noheader").strip(), quiet=30, pause=0.5)

    def going(self) -> "subprocess.Popen[str]":
        """Submit LOOP, and wait until its ranks compute together."""
        process, file = self.start(sys.executable, *SUBMIT, "loop.py"), self.folder / "going"
        begun = limits.wait_until(lambda: file.exists() or process.poll() is not None, pause=0.1)
        assert begun, "neither the file nor an end"
        assert file.exists(), process.communicate()[0]
        return process


@pytest.fixture
def login(cluster: SlurmCluster, tmp_path: Path, variables: dict[str, str]) -> Login:
    """Return the login node."""
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "digits_seen.py").write_text(RECORDING)
    return Login(cluster, tmp_path, variables)


def samples(folder: Path) -> Counter[str]:
    """Return how often a run trained on each sample, on all ranks and in all attempts, and forget it."""
    counted: Counter[str] = Counter()
    for file in folder.glob("seen-*"):
        counted.update(file.read_text().split())
        file.unlink()
    assert counted
    return counted


EXPECTED = [f"{rank} of 4 10 {'n1' if rank < 2 else 'n2'} n1" for rank in range(4)]


@pytest.mark.parametrize(
    "words",
    [
        (*SUBMIT, "sum.py"),
        ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, *LAUNCH, "--cpu", "--nproc-per-node=2", "sum.py"),
        ("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "sum.py"),
    ],
    ids=["submitted", "launcher", "ranks"],
)
def test_ranks_find_each_other(login: Login, words: tuple[str, ...]) -> None:
    """Four ranks on two nodes meet at the first node, not at the one that submits, and reduce together."""
    words = words if words[0] == "srun" else (sys.executable, *words)
    output = login.run(*words)
    assert sorted(line for line in output.splitlines() if " of 4 " in line) == EXPECTED


def test_refusal_of_sbatch_is_shown(login: Login) -> None:
    """What sbatch says about an option is in the error, and nothing was submitted."""
    output = login.run(sys.executable, *SUBMIT, "--slurm", "partition=nowhere", "sum.py", status=1)
    assert re.search("SLURM refused the job; sbatch gives: .*nvalid partition", output), output


def test_doctor_sees_the_job(login: Login) -> None:
    """`accel doctor --slurm` on the login node, and in a step on the second node with one core and no requeue."""
    pytest.importorskip("accel_verify", reason="accel-verify has the doctor")
    doctor = [sys.executable, "-m", "accel_launch", "doctor", "--slurm", "--no-collective", "--json"]
    programs, shell = slurm_findings(login.run(*doctor, quiet=60, status=None))
    assert programs.startswith("ok sbatch, srun, scontrol of slurm"), programs
    assert programs.endswith("; Slurmctld(primary) at login is UP")
    assert shell.startswith("ok no job around this shell")
    step = ["--nodes=2", "--ntasks-per-node=1", "--no-requeue", "--time=30"]
    second = 'if [ "$SLURM_NODEID" = 1 ]; then taskset -c 0 "$@"; fi'
    # srun itself knows no --no-requeue, so a batch script asks for it
    (login.folder / "doctor.sh").write_text(f"#!/bin/bash\nsrun sh -c '{second}' sh \"$@\"\n")
    login.run("sbatch", "--wait", "--output=doctor.log", *step, "doctor.sh", *doctor, quiet=90, status=None)
    log = (login.folder / "doctor.log").read_text()
    _, place, meeting, given, left, requeue = slurm_findings(log)
    assert re.fullmatch(r"ok job \d+, step 0: machine 1 of 2, on n\[1-2\]", place), place
    assert re.fullmatch(r"ok ranks would meet at n1 \(10\.78\.0\.2\), port \d+", meeting), meeting
    assert given == "warning this task has 1 core and no GPU"
    assert re.fullmatch(r"ok time limit: 00:30:00, of which (2\d|30) min are left", left), left
    assert requeue.startswith("warning the job may not be requeued")


def slurm_findings(output: str) -> list[str]:
    """Return state and text of what the doctor found of SLURM."""
    found = json.loads(output[output.index("{") : output.rindex("}") + 1])["findings"]
    return [f"{each['state']} {each['what']}" for each in found if each["topic"] == "SLURM"]


def test_interrupt_leaves_the_job(login: Login) -> None:
    """Ctrl-C without a terminal to answer ends what follows, and not the job; its status is that of an interrupt."""
    process = login.going()
    process.send_signal(signal.SIGINT)
    output, _ = limits.communicate(process)
    job = re.search(r"submitted job (\d+)", output)
    assert process.returncode == 130, output
    assert job is not None, output
    assert f"job {job[1]} goes on; `scancel {job[1]}` ends it" in output
    assert login.run("squeue", "--noheader", "--format=%i").split() == [job[1]]
    login.run("scancel", job[1])
    login.empties()


def test_array_starts_a_run_for_each_number(login: Login) -> None:
    """Each job of an array is a run with a port and a log of its own."""
    login.run(sys.executable, *SUBMIT, "--slurm", "array=0-1", "sum.py")
    login.empties()
    logs = [path.read_text() for path in sorted(login.folder.glob("slurm-*_*.log"))]
    assert len(logs) == 2
    for log in logs:
        assert sorted(line for line in log.splitlines() if " of 4 " in line) == EXPECTED


def test_preempted_by_the_time_limit(login: Login) -> None:
    """The example is requeued at its time limit, goes on by itself, and sees each sample as often as without one."""
    example = ["digits_seen.py", "--folder"]  # the example itself refuses a low accuracy
    login.run(sys.executable, *SUBMIT, "--slurm", "time=30", *example, "straight", quiet=60)
    straight = samples(login.folder)
    # SLURM looks every 30 s, so that on a quiet machine the signal comes 20 to 50 s after the start.
    minutes = 1 + math.ceil(limits.slowness())
    limit = ["--slurm", f"time={minutes}", "--slurm", "signal=B:USR1@70"]
    command = [sys.executable, *SUBMIT, *limit, *example, "requeued"]
    process = login.start("env", f"PAUSE={3 * (minutes - 1)}", *command)
    assert process.stdout is not None
    shown = []
    with process.stdout as lines:
        for line in lines:
            shown.append(line)
            # SLURM lets a requeued job wait for two minutes.
            waiting = re.search(r"job (\d+) is waiting \(BeginTime\)", line)
            if waiting is not None:
                login.run("scontrol", "update", f"JobId={waiting[1]}", "StartTime=now")
    output = "".join(shown)
    assert process.wait(limits.limit()) == 0, output
    sys.stdout.write(output)
    assert "exit code 75" in output, output
    assert "restart 1" in output, output
    assert re.search(r"optimizer steps +[1-9][0-9]* to 36", output), output
    assert samples(login.folder) == straight


def test_killed_node_is_named(login: Login) -> None:
    """The other node's launcher names the node that is gone and ends its ranks; the one that follows ends as well."""
    process = login.going()
    login.cluster.kill("n2")
    begun = time.monotonic()
    assert limits.wait_until(lambda: not login.cluster.pids("n1"), pause=0.1)
    emptied = time.monotonic() - begun
    output, _ = limits.communicate(process)
    sys.stdout.write(
        f"{output}node empty after {emptied:.1f} s, command ended after {time.monotonic() - begun:.1f} s\n"
    )
    login.cluster.restart("n2")
    assert process.returncode not in (0, None), output
    assert "machine 1 (n2) does not answer" in output, output
    assert not login.cluster.pids("n2")
