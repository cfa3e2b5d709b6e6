"""A real SLURM on this machine: a login node with the controller, and two nodes, each in namespaces of its own."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from accel_testing import limits
from accel_testing.network import ip, why_no_networks

__all__ = ["SlurmCluster", "why_not"]

NODES = {"login": "10.78.0.1", "n1": "10.78.0.2", "n2": "10.78.0.3"}
_CONFIGURATION = """
ClusterName=accel
SlurmctldHost=login
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
OverTimeLimit=5
NodeName=n1,n2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Tasks may outlive the limit by OverTimeLimit minutes, so that a busy machine has time to save.


def why_not() -> str:
    """Return why no cluster can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} of Debian's iproute2, munge and slurm-wlm not installed"
    return why_no_networks()


class SlurmCluster:
    """The cluster while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def words(self, node: str, *words: str) -> list[str]:
        """Return the command line that runs a command on a node."""
        # slurmd of Debian 12 wants a folder for cgroups, which it does not use here.
        inside = (
            f"mount --bind {self.folder}/hosts /etc/hosts && mount -t tmpfs none /sys/fs/cgroup && "
            f'hostname {node} && exec "$@"'
        )
        return ["ip", "netns", "exec", self._namespace(node), "unshare", "--uts", "sh", "-c", inside, "sh", *words]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return variables with which programs find the cluster."""
        return {**variables, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def pids(self, node: str) -> list[int]:
        """Return the processes of a node, without those of SLURM."""
        found = []
        for pid in self._all_pids(node):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:  # it has ended
                continue
            found += [pid] * (not name.startswith(("slurm", "munge")))
        return found

    def kill(self, node: str) -> None:
        """End everything on a node at once, as a power failure does."""
        for pid in self._all_pids(node):
            os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Start the network and the daemons, and wait until both nodes are there."""
        hosts = "".join(f"{address} {name}\n" for name, address in {**NODES, "localhost": "127.0.0.1"}.items())
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=self.folder))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("controller", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        self._connect()
        munge = {"socket": "munge.sock", "key-file": "munge.key", "log-file": "munge.log", "pid-file": "munge.pid"}
        munge["seed-file"] = "munge.seed"
        words = [f"--{option}={self.folder / name}" for option, name in munge.items()]
        self._daemon("munged", ["munged", "--force", "--foreground", *words])
        assert limits.wait_until(lambda: (self.folder / "munge.sock").exists(), pause=0.1)
        self._daemon("slurmctld", self.words("login", "slurmctld", "-D"))
        for node in ("n1", "n2"):
            self._daemon(node, self.words(node, "slurmd", "-D", "-N", node))
        assert limits.wait_until(lambda: self._states() == ["idle", "idle"], pause=0.5), self.logs()

    def restart(self, node: str) -> None:
        """Start a node that was killed, and wait until it takes jobs."""
        self._daemon(node, self.words(node, "slurmd", "-D", "-N", node))
        assert limits.wait_until(lambda: self._states() == ["idle", "idle"], pause=0.5), self.logs()

    def stop(self) -> None:
        """End all processes of the cluster, and remove its network."""
        for node in NODES:
            self.kill(node)
        for daemon in self._daemons:
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait(limits.limit())
        for node in NODES:
            subprocess.run(["ip", "netns", "del", self._namespace(node)], capture_output=True, check=False)

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for the message of a failed test."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out"))

    def _states(self) -> list[str]:
        words = self.words("login", "sinfo", "-h", "-N", "-o", "%T")
        return limits.run(words, env=self.environment(os.environ)).stdout.split()

    def _all_pids(self, node: str) -> list[int]:
        words = ["ip", "netns", "pids", self._namespace(node)]
        return [int(pid) for pid in subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()]

    def _connect(self) -> None:
        login = self._namespace("login")
        for node in NODES:
            ip("netns", "add", self._namespace(node))
            ip("-n", self._namespace(node), "link", "set", "lo", "up")
        ip("-n", login, "link", "add", "eth0", "type", "bridge")
        for node, address in NODES.items():
            name = self._namespace(node)
            if node != "login":
                ip("link", "add", node, "netns", login, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", login, "link", "set", node, "master", "eth0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def _daemon(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.out").open("a") as out:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    env=self.environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    @staticmethod
    def _namespace(node: str) -> str:
        return f"slurm-{os.getpid()}-{node}"


@contextmanager
def running() -> Iterator[SlurmCluster]:
    """Start a cluster, and stop it whatever happens."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # a socket's path may have 107 characters
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
