"""Runs one client script on the drop-in and on Accelerate 1.15.0, and gives both results.

A client is a program under `clients/` that uses a released library and prints one line of JSON. `ACCEL_PEER_PYTHON`
names the Python of an environment with the same libraries and the original.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CLIENTS = Path(__file__).parent / "clients"


class Pair(NamedTuple):
    """What a client found on both sides."""

    ours: dict[str, Any]
    theirs: dict[str, Any]


def _run(python: str, words: list[str], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [python, *words], capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=600
    )
    if done.returncode:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode} under {python}:\n{done.stderr[-6000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return a function that runs a client, by name, on both sides; on several ranks where asked."""
    peer = os.environ.get("ACCEL_PEER_PYTHON")
    if not peer:
        pytest.skip("ACCEL_PEER_PYTHON names no environment with Accelerate 1.15.0; `nox -s interop` makes one")

    def run(client: str, ranks: int = 1) -> Pair:
        folder = tmp_path_factory.mktemp(client)
        words = [str(CLIENTS / f"{client}.py")]
        if ranks > 1:
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
        return Pair(_run(sys.executable, words, folder / "ours"), _run(peer, words, folder / "theirs"))

    return run
