"""A test that leaves something behind fails itself, and not its neighbor."""

import os
import sys
from pathlib import Path

import pytest

from accel_testing import limits

LEAKS = """
import logging, os, threading

import torch.distributed as dist
from accel_core.state import PartialState
from accel_testing.guards import *

over = threading.Event()

def test_variable():
    os.environ["LEFT"] = "1"
    del os.environ["HOME"]

def test_level():
    logging.root.setLevel(7)

def test_thread():
    threading.Thread(target=over.wait, name="late").start()

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)

def test_state():
    PartialState(cpu=True)

def test_nothing(fresh_state):
    over.set()
    PartialState(cpu=True)
    assert "LEFT" not in os.environ
    assert "HOME" in os.environ
    assert logging.root.level != 7
    assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_what_is_left_fails_the_test_that_left_it(tmp_path: Path) -> None:
    """Each test that leaves something is an error that says what; the next one finds all but the thread put back."""
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    # Torch 2.8 warns where NumPy is not installed.
    words = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "test_leaks.py"]
    done = limits.run([sys.executable, *words], cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}, quiet=12)
    said = [line.rpartition("the test left ")[2] for line in done.stdout.splitlines() if line.startswith("ERROR test")]
    assert said == [
        "environment variables changed: ['HOME', 'LEFT']",
        "the root logger at level 7 instead of 30",
        "the thread 'late' running",
        "a process group open",
        "state behind; ask for the fixture fresh_state",
    ], done.stdout
    assert "6 passed, 5 errors" in done.stdout
