"""Fixtures that make a leaking test fail itself instead of its neighbor, and a hook that makes all of them faster.

A package's `conftest.py` takes them all with `from accel_testing.guards import *`.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.state import any_set, reset_all
from accel_core.tracking.settings import TrackerKwargs
from accel_testing import limits
from accel_testing.programs import ProgramAndRanks

__all__ = ["accel", "fresh_state", "nothing_left", "process_defaults", "pytest_collection_finish", "variables"]

_OWNED_BY_OTHERS = ("PYTEST_", "COV_", "HYPOTHESIS_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KINETO_", "KMP_")
"""Variables of the test runner, and those that torch sets once when a part of it is first used."""


_OF_THE_MACHINE = ("ACCEL", "FSDP_", "PARALLELISM_", "MEGATRON_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC", "PET_")


def pytest_collection_finish() -> None:
    """Leave what was imported so far out of collections: each would walk all of torch, in tests by the thousand."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return an environment without the settings of the machine that tests, with an empty home and temporary folder."""
    (tmp_path / "temporary").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_MACHINE)}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}


@pytest.fixture
def accel(tmp_path: Path, variables: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `accel WORDS…` in an empty folder, without the settings of the machine that tests; check a status if given.

    The command and the ranks that it starts are forked with torch loaded; with `forked=False` they are processes as
    every user's.
    """

    def run(
        *words: str,
        status: int | None = None,
        more: Mapping[str, str] | None = None,
        quiet: float = 6,
        forked: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "accel_launch", *words]
        environment = {**variables, **(more or {})}
        start = ProgramAndRanks if forked else subprocess.Popen
        options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
        done = limits.run(command, quiet=quiet, started_by=start, **options)
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Give a test that makes an Accelerator or a state clean state before and after."""
    reset_all()
    yield
    reset_all()


@pytest.fixture(autouse=True)
def process_defaults() -> None:
    """Give a test accel's own defaults, which another test's import of the drop-in may have changed."""
    GradientAccumulationPlugin.default_short_window = "actual"
    TrackerKwargs.missing_library = "raise"
    DataLoaderConfiguration.default_restore_position = staticmethod(lambda: True)
    ProjectConfiguration.meets = staticmethod(lambda: True)


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWNED_BY_OTHERS)}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind: variables, the root logger's level, threads, a process group, state.

    All but a thread is put back.
    """
    variables, level, threads = _own_variables(), logging.root.level, set(threading.enumerate())
    yield
    left = []
    changed = sorted({name for name, _ in variables.items() ^ _own_variables().items()})
    if changed:
        left.append(f"environment variables changed: {changed}")
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(variables)
    if logging.root.level != level:
        left.append(f"the root logger at level {logging.root.level} instead of {level}")
        logging.root.setLevel(level)
    new = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in new:
        thread.join(1.0)
    left += [f"the thread {thread.name!r} running" for thread in new if thread.is_alive()]
    if dist.is_available() and dist.is_initialized():
        left.append("a process group open")
        dist.destroy_process_group()
    if "fresh_state" not in request.fixturenames and any_set():
        left.append("state behind; ask for the fixture fresh_state")
        reset_all()
    if left:
        pytest.fail(f"the test left {'; '.join(left)}")
