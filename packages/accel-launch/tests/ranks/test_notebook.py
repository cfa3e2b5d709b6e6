"""Processes started from Python and from a notebook."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_launch.supervision.orphans import alive

GATHER = """
def train(offset):
    import torch
    from accel_core.accelerator import Accelerator
    accelerator = Accelerator()
    found = accelerator.gather(torch.tensor([accelerator.process_index + offset])).tolist()
    open(f"rank{accelerator.process_index}", "w").write(f"{found} {accelerator.mixed_precision}")
    accelerator.end_training()

def fail():
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("bad cell")
    time.sleep(30)
"""


def run(tmp_path: Path, variables: dict[str, str], source: str) -> "subprocess.CompletedProcess[str]":
    """Run a script that uses the launchers."""
    (tmp_path / "cells.py").write_text(f"{GATHER}\nfrom accel_launch.notebook import *\n{source}")
    return subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("notebook_launcher(train, (5,), num_processes=2, mixed_precision='bf16')", "[5, 6] bf16"),
        ("debug_launcher(train, (7,))", "[7, 8] no"),
    ],
)
def test_function_runs_on_two_processes(tmp_path: Path, variables: dict[str, str], call: str, expected: str) -> None:
    """A function of the main module runs on two ranks that gather together."""
    done = run(tmp_path, variables, call)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [expected] * 2


def test_failure_ends_with_the_ranks_traceback(tmp_path: Path, variables: dict[str, str]) -> None:
    """A rank's exception ends the launch with its traceback."""
    done = run(tmp_path, variables, "notebook_launcher(fail, num_processes=2)")
    assert done.returncode == 1
    assert "Rank 1 failed first" in done.stderr
    assert "ValueError: bad cell" in done.stderr


@pytest.mark.parametrize("call", ["notebook_launcher(partner, num_processes=2)", "debug_launcher(partner)"])
def test_the_rank_that_failed_first_is_told(tmp_path: Path, variables: dict[str, str], call: str) -> None:
    """Ranks that lose their partner fail too, most often seen first by torch; the traceback is that of the cause."""
    source = (
        "def partner():\n    import os, torch\n    from accel_core.accelerator import Accelerator\n"
        "    accelerator = Accelerator()\n    accelerator.wait_for_everyone()\n"
        "    if accelerator.process_index == 1:\n        raise ValueError('the cause')\n"
        "    accelerator.gather(torch.ones(1))\n"
    )
    done = run(tmp_path, variables, source + call)
    assert done.returncode == 1
    assert "Rank 1 failed first" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the cause"), done.stderr


def test_detached_children_are_ended(tmp_path: Path, variables: dict[str, str]) -> None:
    """What a rank leaves running in a session of its own is ended, and what the notebook itself started is not."""
    source = (
        "import subprocess, threading, time\ndef leave():\n    import subprocess, os\n"
        "    child = subprocess.Popen(['sleep', '77'], start_new_session=True)\n    child.returncode = 0\n"
        "    open('child' + os.environ['RANK'], 'w').write(str(child.pid))\n"
        "mine = []\nthreading.Timer(0.1, lambda: mine.append(subprocess.Popen(['sleep', '77']))).start()\n"
        "notebook_launcher(leave, num_processes=2)\nassert mine[0].poll() is None\nmine[0].kill()\nmine[0].wait()\n"
    )
    done = run(tmp_path, variables, source)
    assert done.returncode == 0, done.stderr
    assert "outlived their ranks" in done.stderr
    assert not any(alive(int((tmp_path / f"child{rank}").read_text())) for rank in range(2))


def test_accelerator_before_the_launch_is_refused(tmp_path: Path, variables: dict[str, str]) -> None:
    """An Accelerator made before processes are forked is refused, and so are numbers that cannot be meant."""
    source = (
        "from accel_core.errors import ConfigurationError, StateError\n"
        "for words in ({'mixed_precision': 'fp7'}, {'num_processes': 0}, {'node_rank': 1}):\n"
        "    try: notebook_launcher(train, (0,), **words)\n"
        "    except ConfigurationError: print('refused')\n"
        "from accel_core.accelerator import Accelerator\nAccelerator(cpu=True)\n"
        "try: notebook_launcher(train, (0,), num_processes=2)\n"
        "except StateError as error: print(error)\n"
    )
    done = run(tmp_path, variables, source)
    assert done.stdout.count("refused") == 3, done.stderr
    assert "one was made in this notebook" in done.stdout


def test_import_that_initialises_cuda_is_found(tmp_path: Path, variables: dict[str, str]) -> None:
    """The import after which CUDA is initialised is named."""
    (tmp_path / "innocent.py").write_text("")
    (tmp_path / "culprit.py").write_text("import torch\ntorch.cuda._initialized = True\n")
    done = run(
        tmp_path, {**variables, "PYTHONPATH": str(tmp_path)}, "print(initialised_by(['innocent', 'culprit', 'json']))"
    )
    assert done.stdout.strip() == "culprit", done.stderr


@pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="nbclient and ipykernel are not installed"
)
def test_notebook_runs_through_nbclient(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real notebook kernel starts two ranks from a function defined in a cell."""
    import nbformat
    from nbclient import NotebookClient

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(f"import os; os.chdir({str(tmp_path)!r})\n{GATHER}"),
        nbformat.v4.new_code_cell(
            "from accel_launch.notebook import notebook_launcher\nnotebook_launcher(train, (1,), num_processes=2)"
        ),
    ]
    NotebookClient(book, timeout=90).execute()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["[1, 2] no"] * 2
