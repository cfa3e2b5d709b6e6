"""What the tests of accel-launch share: the real command in a real process."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from accel_core.testing.guards import *  # noqa: F403

Accel = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def accel(tmp_path: Path) -> Accel:
    """Run `accel WORDS…` in an empty folder, without the settings of the machine that tests."""

    def run(
        *words: str, variables: Mapping[str, str] | None = None, seconds: float = 60, text: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(
                ("ACCEL", "FSDP_", "PARALLELISM_", "MEGATRON_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC")
            )
        }
        environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"), **(variables or {})}
        return subprocess.run(
            [sys.executable, "-m", "accel_launch", *words],
            cwd=tmp_path,
            env=environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into the folder where `accel` runs, and return its name."""

    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(source)
        return name

    return write
