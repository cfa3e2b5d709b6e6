"""What the launcher of replicas refuses, and what it starts."""

import argparse
from typing import Any

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import installed

pytest.importorskip("accel_launch", reason="accel-launch is an extra")

from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.launchers.registry import choose
from accel_launch.settings import devices
from accel_torchft.launching.launcher import ReplicaLauncher, gpus_of


def settings(*words: str) -> Any:
    """Return the settings of a command line."""
    args: argparse.Namespace = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    return settings_from(args)


def with_torchft(monkeypatch: pytest.MonkeyPatch, version: str | None = "0.2.0") -> None:
    """Let torchft be installed in some version, or not."""
    before = installed.version_of
    monkeypatch.setattr(installed, "version_of", lambda name: version if name == "torchft" else before(name))


@pytest.mark.parametrize(
    "machines", [(), ("--machines=3", "--machine-rank=1", "--main-process-ip=n0", "--main-process-port=29500")]
)
def test_replicas_are_started_by_launchers_of_their_own(
    machines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the command line starts one replica on one machine, which knows that it is one."""
    with_torchft(monkeypatch)
    found = settings("--cpu", "--num-processes", "2", "--replicas", "3", "--min-replicas", "2", *machines)
    launcher = choose(found)
    assert isinstance(launcher, ReplicaLauncher)
    words = launcher.command(found)
    alone = ["--nnodes=1", "--machine-rank=0", "--main-process-port=0"]  # whatever a file or SLURM says of the run
    assert words[1:4] == ["-m", "accel_launch", "launch"]
    assert words[4:] == ["--cpu", "--num-processes=2", *alone, "train.py", "--lr", "1"]
    assert launcher.environ(found)["ACCELERATE_RUNTIME"] == "replicas"


@pytest.mark.parametrize(
    ("words", "visible", "ids"),
    [
        (("-n", "2"), None, ["0,1", "2,3", "4,5"]),
        (("-n", "2", "--gpu-ids", "7,6,5,4,3,2"), None, ["7,6", "5,4", "3,2"]),
        (("-n", "1"), "4, 5,6", ["4", "5", "6"]),
        (("-n", "1"), "MIG-a,MIG-b,MIG-c", ["MIG-a", "MIG-b", "MIG-c"]),
        (("-n", "2", "--cpu"), None, [None, None, None]),
        ((), None, 8),
        (("-n", "3"), None, 8),
        (("-n", "2"), "1,2", 2),
    ],
)
def test_replicas_of_a_machine_have_gpus_of_their_own(
    words: tuple[str, ...], visible: str | None, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that processes see are shared out, and fewer than processes are refused; machine 1 has these replicas."""
    monkeypatch.setattr(devices, "_present", lambda: 8)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, replicas = settings("--replicas", "3", *words), range(3, 6)
    if isinstance(ids, int):
        with pytest.raises(ConfigurationError, match=f"in each of 3 replicas of this machine, and {ids} GPUs"):
            gpus_of(found, replicas)
        return
    variable = "ACCEL_GPU_IDS" if "--gpu-ids" in words else "CUDA_VISIBLE_DEVICES"  # of which the former goes before
    assert [each.get(variable) for each in gpus_of(found, replicas).values()] == ids


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--replicas", "1"), "2 or more"),
        (("--replicas", "2", "--min-replicas", "3"), "min_replicas=3"),
        (("--replicas", "2", "--max-restarts", "1"), "max_restarts from --max-restarts"),
        (("--replicas", "2", "--launcher", "ray"), "launcher from --launcher"),
        (("--replicas", "2", "--num-machines", "3"), "replicas=2 and min_replicas=1 on 3 machines"),
        (("--replicas", "2", "--nnodes", "1:2"), "nnodes from --nnodes"),
        (("--replicas", "2", "--num-machines", "2", "--rdzv-backend", "c10d"), "rdzv_backend from --rdzv-backend"),
    ],
)
def test_what_replicas_cannot_have_is_refused(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that would be ignored, or would start replicas twice, is named with where it comes from."""
    with_torchft(monkeypatch)
    found = settings("--cpu", *words)
    with pytest.raises(ConfigurationError, match=told):
        choose(found).command(found)


def test_torchft_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchft is missing, the command that installs it is named; without --replicas nothing changes."""
    with_torchft(monkeypatch, None)
    assert not ReplicaLauncher().claims(settings("--cpu", "--num-processes", "2"))
    found = settings("--cpu", "--replicas", "2")
    with pytest.raises(MissingDependencyError, match="pip install torchft"):
        choose(found).command(found)
