"""What contradicts itself is refused before anything starts, with both places named."""

from dataclasses import replace
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.settings.checks import check_settings
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.resolved import Resolved
from accel_testing import requires


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu", "--multi-gpu"], "cpu from --cpu and multi_gpu from --multi-gpu"),
        (["--tpu", "--use-fsdp"], "tpu from --tpu and use_fsdp from --use-fsdp"),
        (["--use-fsdp", "--use-deepspeed"], "use_deepspeed from --use-deepspeed and use_fsdp from --use-fsdp"),
        (["--multi-gpu"], "at least 2 processes, one per GPU; got 1 process, and no GPUs here. Leave it out, or pass"),
        (["--num-machines", "2"], "--main-process-ip and no --main-process-port and no --machine-rank"),
        (
            ["--use-parallelism-config", "--num-processes", "4", "--parallelism-config-tp-size", "3"],
            "tp 3 = 3 for 4 processes",
        ),
        (
            ["--use-parallelism-config", "--parallelism-config-tp-size", "0"],
            "got '0' from --parallelism-config-tp-size. Give it a whole number from 1",
        ),
        (["--watchdog", "0"], "seconds above 0"),
        (["--monitor-interval", "-1"], "seconds above 0"),
        (["--max-restarts", "-1"], "Give it a whole number from 0"),
        (
            ["--nnodes", "1:2", "--main-process-ip", "a", "--main-process-port", "1", "--rdzv-conf", "timeout"],
            "KEY=VALUE",
        ),
    ],
)
@requires("engine:fsdp", "engine:deepspeed")
def test_contradiction_is_refused(settings, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    """Combinations that exclude one another and numbers out of range are errors that name where values come from."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: 0)
    with pytest.raises(ConfigurationError) as caught:
        check_settings(settings(*words, "s.py"))
    assert message in str(caught.value)


def test_the_layout_is_worked_out_once(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks settings for their layout gets the same object, and settings that replace them have their own."""
    asked: list[object] = []
    monkeypatch.setattr("accel_launch.settings.layout.count_gpus", lambda *words: asked.append(words) or 3)
    here = settings("--num-machines", "2", "s.py")
    assert here.layout is here.layout
    assert (here.layout.processes, here.layout.machine_rank, len(asked)) == (6, 0, 1)
    there = replace(here, resolved={**here.resolved, "machine_rank": Resolved(1, "flag", "--machine-rank")})
    assert (there.layout.machine_rank, here.layout.machine_rank) == (1, 0)


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs that are named count, up to the first that CUDA does not take, and one part of a GPU of several."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: 8)
    assert count_gpus({}) == 8
    for named, count in {"0,3": 2, "": 0, "-1": 0, "7,8,0": 1, "NoDevFiles": 0, "GPU-a, GPU-b": 2}.items():
        assert count_gpus({"CUDA_VISIBLE_DEVICES": named}) == count
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}, "1") == 1
    assert count_gpus({}, "all") == 8


def test_gpus_that_cannot_be_opened_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container in which /proc lists the machine's eight GPUs has those whose nodes it has."""
    for number in range(8):
        (tmp_path / "proc" / str(number)).mkdir(parents=True)
    nodes = tmp_path / "dev"
    nodes.mkdir()
    for name in ("nvidia6", "nvidiactl", "nvidia-uvm"):
        (nodes / name).touch()
    monkeypatch.setattr("accel_launch.settings.devices._PROC", tmp_path / "proc")
    monkeypatch.setattr("accel_launch.settings.devices._DEV", nodes)
    assert count_gpus({}) == 1
    (nodes / "nvidia6").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi, which would make nodes
    assert count_gpus({}) == 0
