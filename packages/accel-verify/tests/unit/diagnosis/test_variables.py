"""Environment variables that nobody reads, or that contradict each other."""

import re
from pathlib import Path

import pytest

import accel_core
import accel_launch
from accel_launch.settings.variables import KNOWN
from accel_verify.diagnosis.variables import check_variables


def test_every_variable_of_the_source_is_known() -> None:
    """A name that the source of accel-core or accel-launch spells is known; a known one is spelt or made there."""
    folders = [Path(package.__path__[0]) for package in (accel_core, accel_launch)]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    spelled = set(re.findall(r'"(ACCEL(?:ERATE)?_[A-Z0-9_]*[A-Z0-9])"', text))
    assert len(spelled) > 30  # those of most settings are made of their keys
    assert not spelled - KNOWN


def test_a_sound_environment_is_one_finding() -> None:
    """What accel reads is named, and other programs' variables are not."""
    [found] = check_variables({"PATH": "/bin", "ACCELERATE_USE_CPU": "yes", "WORLD_SIZE": ""})
    assert (found.state, found.what) == ("ok", "no contradiction; accel reads ACCELERATE_USE_CPU")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ACCELERATE_MIXED_PRECISON", "Did you mean ACCELERATE_MIXED_PRECISION?"),
        ("ACCELERATE_NUM_PROCESSES", "Did you mean ACCEL_NUM_PROCESSES?"),
        ("ACCEL_WATCHDG", "Did you mean ACCEL_WATCHDOG?"),
        ("ACCEL_QQQQ", "Unset it, or see the page of environment variables."),
    ],
)
def test_a_name_that_nobody_reads(name: str, remedy: str) -> None:
    """A misspelled variable is a warning with the nearest name."""
    [found] = check_variables({name: "1"})
    assert found[1:] == ("warning", f"nothing reads {name}", remedy)


@pytest.mark.parametrize(
    ("environment", "state", "message"),
    [
        (
            {"ACCELERATE_USE_CPU": "1", "ACCELERATE_TORCH_DEVICE": "cuda:0"},
            "problem",
            "ACCELERATE_TORCH_DEVICE for cuda:0",
        ),
        ({"ACCEL_GPU_IDS": "0,1", "CUDA_VISIBLE_DEVICES": "2"}, "warning", "replaces CUDA_VISIBLE_DEVICES=2"),
        ({"OMP_NUM_THREADS": "100000"}, "warning", "100000 threads, for "),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "warning", "waits for others"),
        ({"RANK": "0"}, "warning", "variables of a started process (RANK=0)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_contradictions(environment: dict[str, str], state: str, message: str) -> None:
    """Variables that contradict each other or the machine are found, with what to unset."""
    [found] = check_variables(environment)
    assert found.state == state
    assert message in found.what
    assert "nset" in found.remedy


def test_one_rank_alone_is_no_contradiction() -> None:
    """The variables of a run of one process harm nobody, and CPU goes with the device cpu."""
    fine = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "1"}
    [found] = check_variables(
        {**fine, "ACCELERATE_TORCH_DEVICE": "cpu", "ACCEL_GPU_IDS": "0", "CUDA_VISIBLE_DEVICES": "0"}
    )
    assert found.state == "ok"
