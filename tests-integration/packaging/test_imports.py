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
    done = limits.run([sys.executable, *command], env=env, quiet=12, check=True)
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


PACKAGES = ("accel_core", "accel_launch", "accel_plan", "accel_trackers", "accel_verify", "accel")
HELP = (("--help",), ("launch", "--help"), ("config", "--help"), ("--version",))


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *((("-c", f"import {module}"), module) for module in PACKAGES),
        *(((str(ACCEL), *words), "accel_launch") for words in HELP),
    ],
)
def test_imports_and_help_load_no_torch(command: tuple[str, ...], module: str) -> None:
    """No package, and no help of the command, loads torch or another large library, without a terminal nor rich."""
    names = loaded(*command)
    assert module in names
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
