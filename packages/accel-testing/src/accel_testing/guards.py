"""Fixtures that make a leaking test fail itself instead of its neighbor, and a hook that makes all of them faster.

A package's `conftest.py` takes them all with `from accel_testing.guards import *`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_core.plugins.accumulation import set_default_short_window
from accel_core.plugins.loading import set_default_restore_position
from accel_core.plugins.project import ProjectConfiguration
from accel_core.state import reset_all
from accel_core.tracking.discovery import set_default_missing_library

__all__ = [
    "fresh_state",
    "no_environment_leak",
    "no_log_level_leak",
    "no_process_group_leak",
    "no_state_leak",
    "no_thread_leak",
    "process_defaults",
    "pytest_collection_finish",
    "variables",
]

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
def fresh_state() -> Iterator[None]:
    """Give a test that makes an Accelerator or a state clean state before and after."""
    reset_all()
    yield
    reset_all()


@pytest.fixture(autouse=True)
def process_defaults() -> None:
    """Give a test accel's own defaults, which another test's import of the drop-in may have changed."""
    set_default_short_window("actual")
    set_default_missing_library("raise")
    set_default_restore_position(None)
    ProjectConfiguration.meets = staticmethod(lambda: True)


@pytest.fixture(autouse=True)
def no_environment_leak() -> Iterator[None]:
    """Fail a test that leaves the environment changed, and put it back."""
    before = dict(os.environ)
    yield
    after = {name: value for name, value in os.environ.items() if not name.startswith(_OWNED_BY_OTHERS)}
    kept = {name: value for name, value in before.items() if not name.startswith(_OWNED_BY_OTHERS)}
    if after != kept:
        changed = sorted(name for name in after.keys() | kept.keys() if after.get(name) != kept.get(name))
        os.environ.clear()
        os.environ.update(before)
        pytest.fail(f"the test left environment variables changed: {changed}")


@pytest.fixture(autouse=True)
def no_log_level_leak() -> Iterator[None]:
    """Fail a test that leaves the root logger at another level, and put it back."""
    before = logging.root.level
    yield
    after = logging.root.level
    if after != before:
        logging.root.setLevel(before)
        pytest.fail(f"the test left the root logger at level {after} instead of {before}")


@pytest.fixture(autouse=True)
def no_process_group_leak() -> Iterator[None]:
    """Fail a test that leaves a process group open, and close it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group open")


@pytest.fixture(autouse=True)
def no_state_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves process, run or step state behind, and clear it."""
    yield
    if "fresh_state" in request.fixturenames:
        return
    state = sys.modules.get("accel_core.state")
    if state is not None and state.any_set():
        state.reset_all()
        pytest.fail("the test left state behind; ask for the fixture fresh_state")


@pytest.fixture(autouse=True)
def no_thread_leak() -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread running."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]
    for thread in left:
        thread.join(1.0)
    left = [thread.name for thread in left if thread.is_alive()]  # type: ignore[misc]
    if left:
        pytest.fail(f"the test left threads running: {left}")
