"""What the guide's manifest for Kubernetes gives to the pods, run here as processes; no cluster has run it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_core.host.ports import get_free_port
from accel_testing import limits

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "clusters.md"

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and unshare of util-linux"
    ),
    pytest.mark.skipif(not GUIDE.exists(), reason="only in the repository"),
]

MEET = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} sum {int(total)} {os.environ['MASTER_ADDR']}\\n")
dist.destroy_process_group()
"""
SAVES = """
import pathlib, time
from accel_core.checkpoint import preemption
preemption.watch()
pathlib.Path("begun").touch()
while not preemption.requested():
    time.sleep(0.1)
pathlib.Path("saved").touch()
preemption.leave()
"""


def pod_of_guide() -> dict[str, Any]:
    """Return the pod of the guide's manifest."""
    manifest = yaml.safe_load(GUIDE.read_text().partition("```yaml\n")[2].partition("```")[0])
    pod: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


def command_of(pod: dict[str, Any]) -> list[str]:
    """Return the command of a pod, with the `accel` and the script of the tests, and one process on the CPU."""
    command = pod["containers"][0]["command"]
    assert command == ["accel", "launch", "--nproc-per-node=8", "/app/train.py"]
    return [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--nproc-per-node=1", "train.py"]


def test_pods_meet_though_names_come_late(script, tmp_path: Path, variables: dict[str, str]) -> None:
    """Commands and variables of two pods make one run, though the first one's name is not known at first."""
    script(MEET)
    port = str(get_free_port())
    pod = pod_of_guide()
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    inside = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]

    def start(index: int) -> "subprocess.Popen[str]":
        given = {each["name"]: each.get("value", str(index)) for each in pod["containers"][0]["env"]}
        environment = {**variables, "KUBERNETES_SERVICE_HOST": "10.96.0.1", **given, "MASTER_PORT": port}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*inside, *command_of(pod)], cwd=tmp_path, env=environment, **pipes)

    second = start(1)
    assert second.stderr is not None
    line = second.stderr.readline()
    assert f"waiting for machine 0 at train-machine-0-0.train:{port}" in line
    with hosts.open("a") as file:  # not a new file: the pods have this one
        file.write("127.0.0.1 train-machine-0-0.train\n")
    for index, process in enumerate([start(0), second]):
        output, errors = limits.communicate(process, quiet=20)
        assert process.returncode == 0, errors
        assert f"rank {index} sum 2 train-machine-0-0.train" in output


def test_pod_that_is_taken_away_saves(script, tmp_path: Path, variables: dict[str, str]) -> None:
    """The hook before the end of a pod, whose process 1 is the launcher, lets ranks save; the status is 75 at once."""
    script(SAVES)
    pod = pod_of_guide()
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen([*inside, *command_of(pod)], cwd=tmp_path, env=variables)
    try:
        assert limits.wait_until(lambda: (tmp_path / "begun").exists(), quiet=20, pause=0.1)
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        limits.run(["nsenter", "--target", first, "--pid", "--mount", *hook])
        assert process.wait(limits.limit()) == 75
    finally:
        process.kill()
    assert (tmp_path / "saved").exists()
