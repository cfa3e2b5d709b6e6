"""Two machines in network namespaces, one of which is killed; and MPI."""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there

from accel_core.host.ports import get_free_port
from accel_testing import limits
from accel_testing.network import DEVICE, two_machines
from accel_testing.programs import ProgramAndRanks

TRAIN = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
state = pathlib.Path("step")
step = int(state.read_text()) if state.exists() else 0
while step < 15:
    total = torch.ones(1)
    dist.all_reduce(total)
    step += 1
    if rank == 0:
        state.with_suffix(".new").write_text(str(step))
        state.with_suffix(".new").rename(state)
        with open("log", "a") as log:
            log.write(f"{step} {int(total)}\\n")
    time.sleep(0.2)
dist.destroy_process_group()
"""


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Make two machines that see one another as 10.77.0.1 and 10.77.0.2."""
    with two_machines("10.77.0.1", "10.77.0.2") as names:
        yield names


@pytest.mark.full("a whole training")
def test_killed_machine_and_resumed_run(machines: list[str], tmp_path: Path, variables: dict[str, str]) -> None:
    """Machine 1 is killed in the middle; machine 0 goes on alone from the last state to the end."""
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["launch", "--cpu", "--nproc-per-node", "1", "--nnodes", "1:2", "--max-restarts", "3"]
    words += ["--main-process-ip", "10.77.0.1", "--main-process-port", "29555", "--rdzv-backend", "c10d"]
    words += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"]
    running = []
    for rank, name in enumerate(machines):
        line = ["ip", "netns", "exec", name, sys.executable, "-m", "accel_launch", *words]
        line += ["--machine-rank", str(rank), "train.py"]
        environment = {**variables, "GLOO_SOCKET_IFNAME": DEVICE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
        with (tmp_path / f"machine{rank}").open("w") as said:
            options = {"cwd": tmp_path, "env": environment, "stdout": said, "stderr": said, "start_new_session": True}
            running.append(subprocess.Popen(line, **options))
    log = tmp_path / "log"
    try:
        # On a busy machine 1 may come late; then machine 0 begins alone, and both go on from its last state.
        begun = limits.wait_until(lambda: log.exists() and log.read_text().count(" 2\n") >= 5, pause=0.2)
        assert begun, [(tmp_path / f"machine{rank}").read_text() for rank in range(2)]
        os.killpg(running[1].pid, signal.SIGKILL)
        running[1].wait(limits.limit())
        assert running[0].wait(limits.limit(9)) == 0, (tmp_path / "machine0").read_text()
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(limits.limit())
    lines = [line.split() for line in log.read_text().splitlines()]
    assert lines[0][0] == "1"
    assert sum(size == "2" for _, size in lines) >= 5, "both machines trained together"
    assert lines[-1] == ["15", "1"]
    steps = [int(step) for step, _ in lines]
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(steps))


MEET = """
import atexit, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"sum {int(total)} {os.environ['MASTER_ADDR']}\\n")
if "fail" in sys.argv:
    if dist.get_rank() == 1:
        # What C++ may print while a process ends that raised.
        atexit.register(sys.stderr.write, "terminate called without an active exception\\n")
        dist.destroy_process_group()  # gloo, still open when Python ends, may turn the exit code into SIGABRT
        raise ValueError("boom on machine 1")
    if "together" in sys.argv:
        dist.all_reduce(total)
    time.sleep(3600)
if "once" in sys.argv:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        dist.destroy_process_group()
        raise ValueError("only once")
    dist.all_reduce(total)
dist.destroy_process_group()
"""


@dataclass
class Machines:
    """Launchers that play the machines of one run, on this machine."""

    folder: Path
    variables: dict[str, str]
    address: str = "127.0.0.1"
    number: int = 2
    timeout: int = 60
    before: tuple[str, ...] = ()  # words that the command line begins with
    options: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # for the script
    port: int = field(default_factory=get_free_port)

    def start(self, rank: int) -> "subprocess.Popen[str]":
        """Start the launcher of one machine."""
        (self.folder / "meet.py").write_text(MEET)
        line = [*self.before, sys.executable, "-m", "accel_launch", "launch", "--cpu", "--nproc-per-node", "1"]
        line += ["--num-machines", str(self.number), "--machine-rank", str(rank), "--main-process-ip", self.address]
        line += ["--main-process-port", str(self.port), "--rdzv-conf", f"timeout={self.timeout}"]
        line += [*self.options, "meet.py", *self.words]
        started_by = subprocess.Popen if self.before else ProgramAndRanks
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process: subprocess.Popen[str] = started_by(line, cwd=self.folder, env=self.variables, text=True, **pipes)
        return process


@pytest.fixture
def all_print(printed) -> Callable[..., None]:
    """Wait for launchers that end well, each of which prints the same lines."""

    def check(processes: list["subprocess.Popen[str]"], *lines: str) -> None:
        for status, output, errors in list(map(ended, processes)):
            assert (status, printed(output)) == (0, list(lines)), errors

    return check


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a launcher, and return its status and what it wrote."""
    output, errors = limits.communicate(process, quiet=9)
    return process.returncode, output, errors


def test_machine_that_never_comes_is_named(tmp_path: Path, variables: dict[str, str]) -> None:
    """Machines 0 and 2 of four name those that are missing, both within the limit of the one that waited first."""
    run = Machines(tmp_path, variables, number=4, timeout=3)
    for status, output, errors in map(ended, [run.start(0), run.start(2)]):
        assert (status, output) == (1, "")
        assert re.search(r"all 4 machines came within 3 s; got none with the number 1, 3\.", errors), errors
        assert "Traceback" not in errors


def test_machine_that_comes_late_takes_part(tmp_path: Path, variables: dict[str, str], all_print) -> None:
    """Machine 1 begins to wait before machine 0 is there, and both train."""
    run = Machines(tmp_path, variables)
    second = run.start(1)
    assert second.stderr is not None
    assert "waiting for machine 0" in second.stderr.readline()
    all_print([run.start(0), second], "sum 2 127.0.0.1")


def test_machine_of_another_run_disturbs_none(tmp_path: Path, variables: dict[str, str], all_print) -> None:
    """A launcher with the number of another is refused by name, as is a second machine 0; the first run goes on."""
    run = Machines(tmp_path, variables, number=3)
    first, second = run.start(0), run.start(1)
    store = TCPStore(run.address, run.port, None, False, timedelta(seconds=limits.limit()), wait_for_workers=False)
    assert limits.wait_until(lambda: store.check(["accel/accel/machine/1"]), pause=0.1)
    told = (
        f"Port {run.port} of this machine is taken",
        "Two launchers have the number of machine 1; the other one runs on ",
    )
    for rank, message in enumerate(told):
        status, output, errors = ended(run.start(rank))
        assert (status, output) == (1, "")
        assert message in errors
    all_print([first, second, run.start(2)], "sum 3 127.0.0.1")


def test_two_runs_share_a_machine(tmp_path: Path, variables: dict[str, str], all_print) -> None:
    """Two runs of two machines at the same address, each with its own port, train apart."""
    runs = [Machines(tmp_path, variables), Machines(tmp_path, variables)]
    all_print([run.start(rank) for rank in (0, 1) for run in runs], "sum 2 127.0.0.1")


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_machines_start_again(tmp_path: Path, variables: dict[str, str], all_print, backend: str) -> None:
    """Ranks on two machines that are started again find one another, and not the addresses of those that ended."""
    options = ("--max-restarts", "1", "--rdzv-backend", backend)
    run = Machines(tmp_path, variables, options=options, words=("once",))
    all_print([run.start(0), run.start(1)], *["sum 2 127.0.0.1"] * 2)


def test_failure_on_one_machine_ends_the_other(tmp_path: Path, variables: dict[str, str], printed) -> None:
    """Ranks of two machines reduce together; one's failure ends the other within seconds, which says where and why."""
    deadline = limits.Deadline()
    run = Machines(tmp_path, variables, options=("--log-dir", "logs"), words=("fail",))
    (_, _, first), (_, _, second) = found = list(map(ended, [run.start(0), run.start(1)]))
    assert not deadline.is_over
    for status, output, errors in found:
        assert status != 0
        assert printed(output) == ["sum 2 127.0.0.1"], errors
    assert "ValueError: boom on machine 1" in second.splitlines()[-1], second
    error = r".*ValueError: boom on machine 1; its log there is \S+/logs/rank1.stderr.log"
    assert re.search(rf"stopped by another machine: rank 1 failed on machine 1 \(.+\): {error}", first), first
    assert "failed first" not in first


def test_machines_agree_on_what_failed_first(tmp_path: Path, variables: dict[str, str]) -> None:
    """A rank that fails because the other machine's left is not reported as the cause, though both fail at once."""
    run = Machines(tmp_path, variables, words=("fail", "together"))
    told = [errors for *_, errors in map(ended, [run.start(0), run.start(1)])]
    causes = [re.search(r"stopped by another machine: rank (\d) failed on machine \1", each) for each in told]
    (named,) = [cause[1] for cause in causes if cause is not None]
    assert causes[int(named)] is None
    assert f"Rank {named} failed first" in told[int(named)]
    assert "failed first" not in told[1 - int(named)]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_main_address_of_version_6(tmp_path: Path, variables: dict[str, str], all_print) -> None:
    """Machines meet at an IPv6 address."""
    run = Machines(tmp_path, variables, address="::1")
    all_print([run.start(0), run.start(1)], "sum 2 ::1")


def test_name_with_several_addresses(machines: list[str], tmp_path: Path, variables, all_print) -> None:
    """Machines meet under a name whose first address cannot be reached."""
    (tmp_path / "hosts").write_text("203.0.113.1 several\n127.0.0.1 several localhost\n")
    inside = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    before = ("ip", "netns", "exec", machines[0], "unshare", "--mount", "sh", "-c", inside, "sh")
    run = Machines(tmp_path, variables, address="several", before=before)
    all_print([run.start(0), run.start(1)], "sum 2 several")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpi_starts_ranks_that_reduce(accel, script, tmp_path: Path, printed) -> None:
    """A hostfile starts real MPI processes, which take their ranks from MPI's variables and reduce together."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    name = script(
        "import os, sys, torch\n"
        "from accel_core.comm.collectives import reduce\n"
        "from accel_core.process.world import destroy, ensure\n"
        "here = ensure()\n"
        "total = int(reduce(torch.tensor([here.rank + 1.0]), 'sum'))\n"
        "sys.stdout.write(f'{here.rank} of {here.size} {total} ' + os.environ['ACCELERATE_MIXED_PRECISION'] + '\\n')\n"
        "destroy()\n"
    )
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    words = ["--cpu", "--mpirun-hostfile", "hosts", "--num-processes", "2", "--mixed-precision", "bf16"]
    words += ["--main-process-port", str(get_free_port()), name]
    done = accel("launch", *words, more=allowed, status=0)
    assert sorted(printed(done.stdout)) == ["0 of 2 3 bf16", "1 of 2 3 bf16"]
