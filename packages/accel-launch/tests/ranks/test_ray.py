"""A real Ray cluster of two nodes on this machine: runs that succeed, fail, lose a rank, a machine or the command."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits

pytest.importorskip("ray", reason="ray is not installed")
EXAMPLES = Path(__file__).parents[4] / "examples"
pytestmark = [
    pytest.mark.full("a whole training"),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="needs the examples of the repository"),
]

SUM = """
import os, sys
import torch
from accel_core.comm.collectives import reduce
from accel_core.process.world import destroy, ensure
here = ensure()
total = int(reduce(torch.tensor([here.rank + 1.0]), "sum"))
words = ("of", here.size, total, os.environ["CHOSEN"], os.environ["OMP_NUM_THREADS"], os.getcwd())
sys.stdout.write(" ".join(map(str, words)) + "\\n")
destroy()
"""
LOOP = """
import os, pathlib, sys, time, traceback
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10 if pathlib.Path("lost").exists() else 36000):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0 and step == 5:
        pathlib.Path("going").touch()
    if dist.get_rank() == 2 and "raise" in sys.argv:
        try:
            raise ValueError("boom")
        except ValueError:
            traceback.print_exc()
            os._exit(1)  # at once: others fail as soon as Gloo closes, and Python may take longer to end than they do
    time.sleep(0.1)
"""
KILLED = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_digits
asked, calls = train_digits.preemption.requested, []
def killing():
    calls.append(0)
    if len(calls) == 20 and os.environ["RANK"] == "3" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return asked()
train_digits.preemption.requested = killing
train_digits.main()
"""
TRAINER = """
import sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train():
    import torch, torch.distributed as dist
    from accel import Accelerator
    group = dist.group.WORLD
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 4), accelerator.process_index + 1.0)).sum())
    optimizer.step()
    weight = accelerator.unwrap_model(model).weight.detach()
    weights = accelerator.gather(weight.reshape(1, -1)).tolist()
    same = dist.group.WORLD is group and dist.is_initialized()
    with open(f"trained{accelerator.process_index}", "w") as file:
        file.write(f"{accelerator.num_processes} {accelerator.local_process_index} {same} {weights}")

ray.init(sys.argv[1], log_to_driver=False)
folder = sys.argv[2]
def in_folder():
    import os
    os.chdir(folder)
    train()
TorchTrainer(in_folder, scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})).fit()
"""


class RayCluster:
    """A head and other nodes, with two cores each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._options, "include_dashboard": False})
        self.address: str = self._cluster.address
        self._others: list[Any] = []

    def resize(self, others: int) -> None:
        """Start nodes besides the head, or end some."""
        while len(self._others) > others:
            self._cluster.remove_node(self._others.pop())
        while len(self._others) < others:
            self._others.append(self._cluster.add_node(**self._options))
        self._cluster.wait_for_nodes(limits.limit())

    def kill_one_of(self, run: str) -> None:
        """End everything at once on a node besides the head that takes part in a run, as a power failure does."""
        taking_part = set(_marked(run))
        for node in self._others:
            raylet = node.all_processes["raylet"][0].process.pid
            there = _marked(f"RAY_RAYLET_PID={raylet}")
            if taking_part.intersection(there):
                for pid in [raylet, *there]:
                    os.kill(pid, signal.SIGKILL)
                self._cluster.remove_node(node, allow_graceful=False)
                self._others.remove(node)
                return
        raise AssertionError("no node besides the head takes part")

    def stop(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def _marked(variable: str) -> list[int]:
    """Return the processes with a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(folder.name)] * (variable.encode() in variables)
    return found


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """Start the cluster, and stop it whatever happens."""
    cluster = RayCluster()
    yield cluster
    cluster.stop()


class Login:
    """A machine of the cluster with a folder that all see."""

    def __init__(self, cluster: RayCluster, folder: Path, variables: dict[str, str]) -> None:
        self.cluster, self.folder = cluster, folder
        self._variables = {**variables, "CHOSEN": f"by{os.getpid()}-{folder.name}"}
        self.mark = f"CHOSEN={self._variables['CHOSEN']}"

    def start(self, *words: str, machines: int = 2) -> "subprocess.Popen[str]":
        """Start a run with its outputs together."""
        command = [sys.executable, "-m", "accel_launch", "launch", "--launcher", "ray", "--address"]
        command += [self.cluster.address, "--machines", str(machines), "--processes-per-machine", "2", *words]
        # What runs in the background ignores SIGINT, and so would all that it starts.
        restore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=self._variables, text=True, preexec_fn=restore, **pipes)

    def run(self, *words: str, quiet: float = 30, machines: int = 2, status: int = 0) -> str:
        """Run a run that ends with a status, and return its outputs."""
        return self.end(self.start(*words, machines=machines), status, quiet)

    def end(self, process: "subprocess.Popen[str]", status: int, quiet: float = 30) -> str:
        """Wait for a run that ends with a status, and return its outputs."""
        output, _ = limits.communicate(process, quiet=quiet)
        sys.stdout.write(output)
        assert process.returncode == status, output
        return output

    def going(self, process: "subprocess.Popen[str]") -> None:
        """Wait until the ranks of LOOP compute together."""
        file = self.folder / "going"
        assert limits.wait_until(lambda: file.exists() or process.poll() is not None, quiet=30, pause=0.1)
        assert file.exists(), process.communicate()[0]

    def seconds_to_empty(self, begun: float) -> float:
        """Return when the last process of the run had ended."""
        assert limits.wait_until(lambda: not _marked(self.mark), quiet=30, pause=0.1), _marked(self.mark)
        return time.monotonic() - begun


@pytest.fixture
def login(started: RayCluster, tmp_path: Path, variables: dict[str, str]) -> Login:
    """Return a machine of the complete cluster."""
    started.resize(others=1)
    for name, text in (("sum.py", SUM), ("loop.py", LOOP), ("killed.py", KILLED), ("trainer.py", TRAINER)):
        (tmp_path / name).write_text(text)
    return Login(started, tmp_path, variables)


@pytest.mark.parametrize("sent", [False, True], ids=["shared", "sent"])
def test_ranks_find_each_other(login: Login, sent: bool) -> None:
    """Four ranks on two machines reduce together, in the folder or in a copy of it, with the caller's variables."""
    words = ["--ray", "working_dir=."] * sent
    output = login.run("--cpu", *words, "sum.py")
    lines = sorted(line for line in output.splitlines() if " of 4 10 " in line)
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank{rank}]: of 4 10 {login.mark.partition('=')[2]} 1 "), output
        assert (Path(line.split()[-1]) == login.folder) is not sent
    assert len(lines) == 4, output


def test_failure_names_machine_and_rank(login: Login) -> None:
    """The report shows the traceback of the first failure once, and the last line names its rank and machine."""
    output = login.run("--cpu", "loop.py", "raise", status=1)
    assert output.count('raise ValueError("boom")') == 1, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("accel launch: rank 2 on machine 1 ("), output
    assert last.endswith("failed first: exit code 1"), output
    assert not _marked(login.mark)


def test_killed_rank_is_restarted(login: Login) -> None:
    """The example loses a rank, starts again on all machines, and reaches its accuracy, which it checks itself."""
    output = login.run("--cpu", "--max-restarts", "1", "killed.py", "--folder", "out", quiet=60)
    assert (login.folder / "killed").exists()
    again = r"accel launch: rank 3 on machine 1 \(.*\) failed first: killed by SIGKILL; all machines start again"
    assert re.search(rf"{again} \(restart 1 of 1\)", output), output
    assert "test accuracy" in output


@pytest.mark.parametrize("lost", ["machine", "actor"])
def test_lost_machine_is_named(login: Login, lost: str) -> None:
    """The run ends everywhere within 20 s of a quiet machine, and the last line names the machine."""
    process = login.start("--cpu", "loop.py")
    login.going(process)
    begun = time.monotonic()
    if lost == "machine":
        login.cluster.kill_one_of(login.mark)
    else:
        (launcher,) = (pid for pid in _marked(login.mark) if b"--machine-rank=1" in _words(pid) and _is_first(pid))
        os.kill(_parent(launcher), signal.SIGKILL)
    output = login.end(process, 1)
    ended, emptied = time.monotonic() - begun, login.seconds_to_empty(begun)
    sys.stdout.write(f"command ended after {ended:.1f} s, no process after {emptied:.1f} s\n")
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"accel launch: machine \d \(.*\) does not answer", last), output
    assert max(ended, emptied) < 20 * limits.slowness()


def test_lost_machine_is_replaced(login: Login) -> None:
    """With a restart left, the run goes on where Ray has another machine."""
    login.cluster.resize(others=2)
    process = login.start("--cpu", "--max-restarts", "1", "loop.py")
    login.going(process)
    (login.folder / "lost").touch()
    login.cluster.kill_one_of(login.mark)
    output = login.end(process, 0, quiet=60)
    assert re.search(r"machine \d \(.*\) does not answer; all machines start again \(restart 1 of 1\)", output), output


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_first(pid: int) -> bool:
    """Return whether a launcher is not the reaper, which it forked."""
    return _words(_parent(pid)) != _words(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_end_of_the_command_ends_the_run(login: Login, number: signal.Signals) -> None:
    """After Ctrl-C, and even after SIGKILL, no process of the run is left on any machine."""
    process = login.start("--cpu", "loop.py")
    login.going(process)
    begun = time.monotonic()
    process.send_signal(number)
    login.end(process, 130 if number == signal.SIGINT else -number)
    sys.stdout.write(f"no process after {login.seconds_to_empty(begun):.1f} s\n")


def test_what_the_cluster_lacks_is_named(login: Login, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Machines, GPUs, a script in a folder that was sent without it, and a cluster that does not answer."""
    limit = ["--rdzv-conf", "timeout=1"]
    elsewhere = f"working_dir={tmp_path_factory.mktemp('elsewhere')}"
    for words, machines, told in (
        (["--cpu", *limit], 3, "it needs 3 machines with 2 CPU and 0 GPU each, got 2 with 2 CPU and 0 GPU"),
        (limit, 2, "it needs 2 machines with 2 CPU and 2 GPU each, got 2 with 2 CPU and 0 GPU"),
        (["--cpu", "--ray", elsewhere], 2, "has no 'sum.py'. Put it on a disk that all machines see"),
        (
            ["--cpu", "--address", "127.0.0.1:1"],
            2,
            "'127.0.0.1:1' gives: [Errno 111] Connection refused. Start the command on",
        ),
    ):
        assert told in login.run(*words, "sum.py", machines=machines, status=1)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and unshare of util-linux"
)
def test_ray_starts_here_without_a_cluster(tmp_path: Path, variables: dict[str, str]) -> None:
    """Where no cluster is found, a run on one machine starts Ray on it, and says so."""
    (tmp_path / "sum.py").write_text(SUM)
    # Ray finds clusters among the processes of the machine, so this run sees none but its own.
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    words = [sys.executable, "-m", "accel_launch", "launch", "--launcher", "ray", "--cpu", "-n", "2", "sum.py"]
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets are in it
        environment = {**variables, "CHOSEN": f"by{os.getpid()}", "RAY_TMPDIR": folder}
        done = limits.run([*alone, *words], cwd=tmp_path, env=environment, quiet=60, check=True)
    assert "there is no Ray cluster; Ray starts on this machine" in done.stderr
    assert len(re.findall(r"\[rank[01]\]: of 2 3 ", done.stdout)) == 2, done.stdout


def test_accelerator_inside_torch_trainer(login: Login) -> None:
    """Ray Train's own workers: the group that is there is taken, and gradients are the mean over both."""
    command = [sys.executable, "trainer.py", login.cluster.address, str(login.folder)]
    limits.run(command, cwd=login.folder, env=login._variables, quiet=60, check=True)
    for rank in range(2):
        found = (login.folder / f"trained{rank}").read_text()
        assert found == f"2 {rank} True {[[-1.5] * 4] * 2}"
