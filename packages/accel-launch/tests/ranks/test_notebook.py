"""Processes started from Python and from a notebook."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_core.errors import UnsupportedTypeError
from accel_launch.notebook import initialized_by, notebook_launcher
from accel_testing import limits

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
    time.sleep(3600)
"""


@pytest.fixture
def run(tmp_path: Path, variables: dict[str, str]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return what runs a script that uses the launchers, and ends well unless `check` says otherwise."""

    def run(source: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "cells.py").write_text(f"{GATHER}\nfrom accel_launch.notebook import *\n{source}")
        return limits.run([sys.executable, "cells.py"], cwd=tmp_path, env=variables, quiet=9, check=check)

    return run


@pytest.mark.parametrize("processes", [1, 2])
def test_a_function_that_was_called_already_is_refused(processes: int) -> None:
    """What it returned cannot be run; the message says to leave the call out."""
    with pytest.raises(UnsupportedTypeError, match=r"got None\. Write notebook_launcher\(train\), without calling it"):
        notebook_launcher(None, num_processes=processes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("launcher", "words", "expected"),
    [
        ("notebook_launcher", "num_processes=2, mixed_precision='bf16'", "[5, 6] bf16"),
        ("debug_launcher", "num_processes=2", "[5, 6] no"),
    ],
)
def test_two_processes_succeed_and_fail(tmp_path: Path, run, printed, launcher: str, words: str, expected: str) -> None:
    """Two ranks gather together; where one raises, the launch ends with its one traceback, as torch's error and ours.

    Ranks that lose their partner fail too, most often seen first by torch; what is told is the cause.
    """
    source = (
        "def partner():\n    import torch\n    from accel_core.accelerator import Accelerator\n"
        "    accelerator = Accelerator()\n    accelerator.wait_for_everyone()\n"
        "    if accelerator.process_index == 1:\n        raise ValueError('the cause')\n"
        "    accelerator.gather(torch.ones(1))\n"
        "import pickle, sys\nfrom accel_core.errors import LaunchError\n"
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        f"{launcher}(train, (5,), {words})\n"
        f"try: {launcher}(fail, num_processes=2)\n"
        "except ChildFailedError as error:\n"
        "    assert isinstance(error, LaunchError) and str(pickle.loads(pickle.dumps(error))) == str(error)\n"
        "    print(error)\n"
        f"{launcher}(partner, num_processes=2)\n"
    )
    done = run(source, check=False)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [expected] * 2, done.stderr
    shown = "\n".join(printed(done.stdout))
    assert shown.startswith("Rank 1 failed first")
    assert shown.rstrip().endswith("ValueError: bad cell")
    assert shown.count("Traceback (most recent call last)") == 1
    assert done.returncode == 1
    assert "Rank 1 failed first" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the cause"), done.stderr
    # One of the notebook, one of the rank.
    assert done.stderr.count("Traceback (most recent call last)") == 2, done.stderr


def test_one_process_takes_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is not sent to the CPU because the launcher counts no GPU: torch may find one of another kind."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    seen = []
    notebook_launcher(lambda: seen.append(os.environ.get("ACCELERATE_USE_CPU")), num_processes=1)
    assert seen == [None]


def test_state_that_a_forked_rank_reset_says_so(tmp_path: Path, run) -> None:
    """Under `debug_launcher` the old object has no facts and waits for nobody; the next one knows both ranks."""
    source = (
        "def reset():\n    import os\n    from accel_core.state import PartialState\n"
        "    old = PartialState()\n    PartialState._reset_state()\n    missed = []\n"
        "    for ask in (lambda: old.process_index, old.wait_for_everyone, lambda: repr(old)):\n"
        "        try: missed.append(ask())\n"
        "        except AttributeError as error: missed.append(str(error).split('`')[3])\n"
        "    new = PartialState()\n"
        "    open('said' + os.environ['RANK'], 'w').write(f'{missed} {new.num_processes} {old.process_index}')\n"
        "debug_launcher(reset, num_processes=2)\n"
    )
    run(source)
    for rank in range(2):
        expected = f"['process_index', 'distributed_type', 'distributed_type'] 2 {rank}"
        assert (tmp_path / f"said{rank}").read_text() == expected


def test_restarted_ranks_do_not_look_for_those_that_ended(tmp_path: Path, run) -> None:
    """After a failure all ranks are started again, find one another, and what went wrong was said; signals are back."""
    source = (
        "def once():\n    import os, torch\n    from accel_core.accelerator import Accelerator\n"
        "    accelerator = Accelerator()\n    accelerator.gather(torch.ones(1))\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and accelerator.process_index == 1:\n"
        "        raise ValueError('only once')\n"
        "    accelerator.gather(torch.ones(1))\n"
        "    open('again' + os.environ['RANK'], 'w').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "import signal\nbefore = signal.getsignal(signal.SIGINT)\n"
        "notebook_launcher(once, num_processes=3, max_restarts=1)\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
    )
    done = run(source)
    assert [(tmp_path / f"again{rank}").read_text() for rank in range(3)] == ["1"] * 3
    assert "Rank 1 failed first" in done.stderr
    assert "ValueError: only once" in done.stderr


def test_what_came_before_the_processes_is_refused(run) -> None:
    """An Accelerator that was made before processes are forked is refused, and so are numbers that are not valid."""
    source = (
        "from accel_core.errors import ConfigurationError, StateError\n"
        "for words in ({'mixed_precision': 'fp7'}, {'num_processes': 0}, {'node_rank': 1}):\n"
        "    try: notebook_launcher(train, (0,), **words)\n"
        "    except ConfigurationError: print('refused')\n"
        "from accel_core.accelerator import Accelerator\nAccelerator(cpu=True)\n"
        "try: notebook_launcher(train, (0,), num_processes=2)\n"
        "except ValueError as error: print(isinstance(error, StateError), error)\n"
    )
    done = run(source)
    assert done.stdout.count("refused") == 3, done.stderr
    assert "True Processes are started before any Accelerator is made; one was made in this notebook" in done.stdout


@pytest.mark.parametrize(
    "use",
    [
        "torch.cuda._initialized = True",
        # What a build with CUDA answers in forks of a process that called torch.cuda.is_available().
        "import os; here = os.getpid(); torch.cuda._is_in_bad_fork = lambda: os.getpid() != here",
    ],
)
def test_import_that_uses_cuda_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """The import is named after which CUDA is initialized, or was asked for devices, which forks cannot use then."""
    (tmp_path / "innocent.py").write_text("")
    (tmp_path / "culprit.py").write_text(f"import torch\n{use}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    assert initialized_by(["innocent", "culprit", "json"]) == "culprit"


@pytest.mark.full("every library at once")
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
    NotebookClient(book, timeout=int(limits.limit(9))).execute()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["[1, 2] no"] * 2
