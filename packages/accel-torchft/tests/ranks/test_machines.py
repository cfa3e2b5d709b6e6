"""Replicas on two machines: launchers that play them here, and machines in network namespaces that are cut off."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_core.host.ports import get_free_port
from accel_testing import limits
from accel_testing.network import DEVICE, ip, two_machines

sys.path.insert(0, str(Path(__file__).parents[1]))
from replica_runs import SAMPLES, check, command_of, results

pytest.importorskip("accel_launch", reason="accel-launch is an extra")
pytest.importorskip("torchft", reason="torchft is not installed")

ADDRESSES = ("10.79.0.1", "10.79.0.2")
SLURM = Path(__file__).parents[3] / "accel-launch" / "tests" / "ranks"
CUT = 5.0  # seconds without a network


def started(
    folder: Path, *words: str, replicas: int = 2, epochs: int = 3, names: Sequence[str] = ()
) -> "list[subprocess.Popen[str]]":
    """Start the launchers of two machines; without namespaces, both at this machine's loopback address."""
    place = f"--main-process-ip={ADDRESSES[0] if names else '127.0.0.1'}", f"--main-process-port={get_free_port()}"
    found = []
    for machine in range(2):
        flags = ("--num-machines=2", f"--machine-rank={machine}", *place)
        command = command_of(folder, *words, *flags, replicas=replicas, epochs=epochs)
        before = ["ip", "netns", "exec", names[machine]] if names else []
        variables = {**os.environ, **({"GLOO_SOCKET_IFNAME": DEVICE} if names else {})}
        run = subprocess.Popen(
            [*before, *command], env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        found.append(run)
    return found


def ended(runs: "list[subprocess.Popen[str]]", folder: Path, replicas: int = 2) -> dict[str, Any]:
    """Wait for launchers that end well; return what each rank found, and what they said."""
    said = [limits.communicate(run, quiet=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    return {**results(folder, replicas, str(said)), "report": "\n".join(errors for _, errors in said)}


def steps_of(folder: Path, replica: int) -> int:
    """Return how many steps a replica has made."""
    path = folder / f"read-{replica}-0"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Make two network namespaces that reach each other."""
    with two_machines(*ADDRESSES) as found:
        yield found


def test_a_replica_dies_on_another_machine_and_comes_back(tmp_path: Path) -> None:
    """Each machine starts its own replica, and starts it again; machine 0 alone says how all of them lived."""
    found = ended(started(tmp_path, "1:0:3:before"), tmp_path)
    assert found["report"].count("2 of 2 replicas came to the end of the script") == 1
    assert "replica 1 ended: killed by SIGKILL; it starts again at once. 0 of 1 run on machine 1" in found["report"]
    assert "was made without 1, " in found["report"]
    check(found, tmp_path, 3, {1: 1})


@pytest.mark.full("a whole training")
def test_machines_that_are_cut_off_for_a_while_lose_no_sample(tmp_path: Path, names: list[str]) -> None:
    """The network between two machines is down for seconds: each sample is trained with once, and weights are equal."""
    runs = started(tmp_path, "", "slow", replicas=3, epochs=40, names=names)
    try:
        assert limits.wait_until(lambda: steps_of(tmp_path, 2) > 20, quiet=30)
        ip("-n", names[1], "link", "set", DEVICE, "down")
        time.sleep(CUT)
        ip("-n", names[1], "link", "set", DEVICE, "up")
        assert all(run.poll() is None for run in runs), "the run outlives the cut"
        before = steps_of(tmp_path, 2)
        assert limits.wait_until(lambda: steps_of(tmp_path, 2) > before + 5, quiet=30), "machine 1 trains again"
    except BaseException:
        for run in runs:
            run.terminate()
        raise
    found = ended(runs, tmp_path, replicas=3)
    assert "was made without 2, " in found["report"]
    check(found, tmp_path, 40, {})


@pytest.mark.full("a whole training")
def test_a_machine_that_stays_cut_off_ends_by_itself(tmp_path: Path, names: list[str]) -> None:
    """Machine 0 trains to the end without it; its launcher gives up machine 0 after a minute, and says so."""
    runs = started(tmp_path, "", "slow", replicas=3, epochs=30, names=names)
    assert limits.wait_until(lambda: steps_of(tmp_path, 2) > 20, quiet=30)
    ip("-n", names[1], "link", "set", DEVICE, "down")
    (_, first), (_, second) = (limits.communicate(run, quiet=90) for run in runs)
    assert [run.returncode for run in runs] == [0, 1], first + second
    assert f"machine 1 ({ADDRESSES[1]}) does not answer; its replicas are taken for dead: 2" in first
    assert f"got no answer for 60 s at {ADDRESSES[0]}:" in second
    assert "Traceback" not in second
    found = results(tmp_path, 2, first)
    for rank in found.values():
        assert rank["weights"]["times"].tolist() == [30] * SAMPLES
    assert not (Path("/proc") / (tmp_path / "start-2-0").read_text()).exists()


@pytest.mark.full("another case of a grid")
def test_the_others_train_on_where_a_launcher_dies(tmp_path: Path) -> None:
    """A machine whose launcher is killed is as its replicas dying; no process of it is left, and the run ends well."""
    runs = started(tmp_path, "", "slow", "once", replicas=3, epochs=30)
    assert limits.wait_until(lambda: steps_of(tmp_path, 2) > 5, quiet=30)
    runs[1].kill()
    limits.communicate(runs[1])
    _, said = limits.communicate(runs[0], quiet=120)
    assert runs[0].returncode == 0, said
    assert "2 of 3 replicas came to the end of the script" in said
    assert re.search(r"machine 1 \(127\.0\.0\.1\) does not answer; its replicas are taken for dead: 2", said), said
    found = {**results(tmp_path, 2, said), "report": said}
    check(found, tmp_path, 30, {})
    assert not (Path("/proc") / (tmp_path / "start-2-0").read_text()).exists()


@pytest.mark.full("another case of a grid")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_ends_with_the_launcher_of_machine_0(sent: signal.Signals, tmp_path: Path) -> None:
    """Where it is killed, the others say by name that it is gone; where it is asked to end, all of them do."""
    runs = started(tmp_path, "", "slow", epochs=60)
    assert limits.wait_until(lambda: steps_of(tmp_path, 1) > 5, quiet=30)
    runs[0].send_signal(sent)
    (_, first), (_, second) = (limits.communicate(run, quiet=60) for run in runs)
    if sent == signal.SIGKILL:
        assert runs[1].returncode == 1, second
        assert "The launcher of machine 0 keeps what replicas tell each other; got no answer at 127.0.0.1:" in second
        # Where a rank comes to it before its launcher does, it raises the same error.
        assert second.count("Traceback") == second.count("LaunchError: The launcher of machine 0 keeps")
    else:
        assert [run.returncode for run in runs] == [128 + signal.SIGTERM] * 2, first + second
        assert "0 of 2 replicas came to the end of the script" in first
        assert "Traceback" not in second
    assert not any((Path("/proc") / path.read_text()).exists() for path in tmp_path.glob("start-*"))


@pytest.mark.full("another case of a grid")
def test_a_job_of_slurm_has_its_replicas_on_all_nodes(tmp_path: Path) -> None:
    """A run that is submitted starts a launcher on each node, with its share; ranks do not take SLURM's numbers."""
    if not SLURM.is_dir():
        pytest.skip("needs the cluster of accel-launch's tests")
    sys.path.insert(0, str(SLURM))
    slurm = importlib.import_module("slurm_cluster")
    if slurm.why_not():
        pytest.skip(f"no SLURM here: {slurm.why_not()}")
    command = command_of(tmp_path, "1:0:3:before", "--launcher=slurm", "--machines=2")
    with slurm.running() as cluster:
        words = cluster.words("login", *command)
        done = limits.run(words, cwd=tmp_path, env=cluster.environment(os.environ), quiet=60)
        assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    assert "replica 1 ended: killed by SIGKILL; it starts again at once. 0 of 1 run on machine 1" in done.stdout
    assert done.stdout.count("2 of 2 replicas came to the end of the script") == 1
    check({**results(tmp_path, 2, done.stdout), "report": ""}, tmp_path, 3, {1: 1})
