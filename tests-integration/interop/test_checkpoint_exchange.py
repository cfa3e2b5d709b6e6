"""Folders of save_state are exchanged with Accelerate, in both directions.

Set ACCEL_PEER_PYTHON to a Python that has accelerate 1.15.0 and torch; without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_core.host.ports import get_free_port
from accel_testing import limits
from accel_testing.programs import Program

PEER = os.environ.get("ACCEL_PEER_PYTHON")
SCRIPT = str(Path(__file__).with_name("exchange.py"))
LIBRARIES = {"accelerate": PEER or sys.executable, "accel_core.accelerator": sys.executable}

pytestmark = pytest.mark.skipif(PEER is None, reason="needs ACCEL_PEER_PYTHON, a Python with accelerate 1.15.0")


def act(library: str, action: str, directory: Path, size: int) -> None:
    """Run the script on `size` ranks."""
    port = get_free_port()
    ranks = []
    for rank in range(size):
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        if library == "accelerate":
            environment.pop("PYTHONPATH", None)  # may name a tree of this project, which the original must not find
        if size > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [LIBRARIES[library], SCRIPT, library, action, str(directory)]
        start = subprocess.Popen if library == "accelerate" else Program  # the original's Python is another one
        ranks.append(start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [limits.communicate(process, quiet=12)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(outputs)


@pytest.mark.parametrize(
    ("writer", "reader", "size"),
    [
        ("accelerate", "accel_core.accelerator", 2),
        ("accel_core.accelerator", "accelerate", 1),
        pytest.param("accelerate", "accel_core.accelerator", 1, marks=pytest.mark.full("another case of a grid")),
        pytest.param("accel_core.accelerator", "accelerate", 2, marks=pytest.mark.full("another case of a grid")),
    ],
)
def test_a_folder_of_one_is_resumed_exactly_by_the_other(writer: str, reader: str, size: int, tmp_path: Path) -> None:
    """With and without safetensors: two models, optimizers, schedule, object and random states of every rank."""
    act(writer, "write", tmp_path, size)
    act(reader, "resume", tmp_path, size)
    written = sorted(tmp_path.glob("write-*.pt"))
    assert len(written) == (2 if size == 1 else 5 * size)
    for path in written:
        straight = torch.load(path, weights_only=True)
        resumed = torch.load(path.with_name(path.name.replace("write-", "resume-")), weights_only=True)
        assert straight.keys() == resumed.keys(), path.name
        different = [name for name in straight if not torch.equal(straight[name], resumed[name])]
        assert different == [], path.name
