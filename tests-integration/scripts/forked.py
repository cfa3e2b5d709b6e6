"""Runs the scripts of this folder in processes that are forked from one which has loaded what they need.

`python forked.py FOLDER PROCESSES NAME...` runs each script on that many processes, one script after the other, in a
folder of its own. `FOLDER/NAME.printed` is what its processes printed, `FOLDER/NAME.raised` what they raised.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from accel_core.host.ports import get_free_port

HERE = Path(__file__).parent


def run_all(place: Path, processes: int, names: Iterable[str]) -> None:
    """Run the scripts that are named."""
    torch.set_num_threads(1)  # threads of OpenMP that ran before a fork are waited for, and missing, behind it
    sys.path.insert(0, str(HERE))
    for slow in ("torch._dynamo", "torch.distributed.fsdp"):  # the first optimizer, and the first wrapper, import them
        importlib.import_module(slow)
    importlib.import_module("samples").digits(0, 1)
    for name in names:
        folder = place / name
        folder.mkdir()
        for rank in [_fork(name, folder, variables) for variables in _ranks(processes)]:
            os.waitpid(rank, 0)


def _ranks(processes: int) -> list[dict[str, str]]:
    """Return the environment of each process, as torchrun gives it; a process alone has none."""
    if processes == 1:
        return [{}]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _fork(name: str, folder: Path, variables: dict[str, str]) -> int:
    """Run a script in a new process, and return the number of the process."""
    child = os.fork()
    if child:
        return child
    os.environ.update(variables)
    os.chdir(folder)
    with open(f"{folder}.printed", "a") as printed, open(f"{folder}.raised", "a") as raised:
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
        except BaseException:
            raised.write(traceback.format_exc())
    os._exit(0)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
