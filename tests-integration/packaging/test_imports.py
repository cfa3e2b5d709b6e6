"""What an import or a command loads: torch only where it is needed, siblings never by chance."""

import os
import sys
from pathlib import Path

import pytest

from accel_testing import limits

ACCEL = Path(sys.executable).with_name("accel")
SIBLINGS = {
    "accel_bigmodel", "accel_deepspeed", "accel_launch", "accel_megatron", "accel_parallel", "accel_trackers",
    "accel_plan", "accel_quant", "accel_testing", "accel_torchft", "accel_verify", "accel", "accelerate",
}  # fmt: skip
HEAVY = {"torch", "numpy", "rich", "questionary", "transformers", "tensorboard", "bitsandbytes"}


def loaded(*command: str) -> set[str]:
    """Run Python on a command and return the top-level modules that it imports."""
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = limits.run([sys.executable, *command], env=env, quiet=12)
    assert done.returncode == 0, done.stderr
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize(
    "module", ["accel_core", "accel_launch", "accel_plan", "accel_trackers", "accel_verify", "accel"]
)
def test_importing_a_package_loads_no_torch(module: str) -> None:
    """`python -X importtime -c "import …"` shows neither torch nor another large library."""
    names = loaded("-c", f"import {module}")
    assert module in names
    assert not names & HEAVY


@pytest.mark.parametrize("words", [("--help",), ("launch", "--help"), ("config", "--help"), ("--version",)])
def test_help_loads_no_torch(words: tuple[str, ...]) -> None:
    """The command's help is there before torch could be; without a terminal not even rich is loaded."""
    names = loaded(str(ACCEL), *words)
    assert "accel_launch" in names
    assert not names & HEAVY


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("accel_core", SIBLINGS),
        ("accel_bigmodel", SIBLINGS - {"accel_bigmodel"}),
        ("accel_deepspeed", SIBLINGS - {"accel_deepspeed"}),
        ("accel_launch", SIBLINGS - {"accel_launch"}),
        ("accel_megatron", SIBLINGS - {"accel_megatron", "accel_parallel"}),
        ("accel_parallel", SIBLINGS - {"accel_parallel"}),
        ("accel_torchft", SIBLINGS - {"accel_torchft"}),
        ("accel_trackers", SIBLINGS - {"accel_trackers"}),
        ("accel_plan", SIBLINGS - {"accel_plan", "accel_bigmodel"}),
        ("accel_quant", SIBLINGS - {"accel_quant", "accel_bigmodel"}),
        ("accel_testing", SIBLINGS - {"accel_testing"}),
        ("accel_verify", SIBLINGS - {"accel_verify", "accel_launch"}),
    ],
)
def test_importing_a_package_loads_no_sibling_beside_it(module: str, strangers: set[str]) -> None:
    """Even where all packages are installed, each loads only those that it stands on."""
    names = loaded("-c", f"import {module}")
    assert not names & strangers
