"""What blocks of READMEs, concepts and docstrings take for granted: a small model, real data, files beside the script.

Tutorials and guides take nothing for granted: `run_file` and `run_session` give their blocks an empty namespace. Each
function named `run_...` is the body of a process of its own, which is forked from one that has loaded torch: a page's
blocks take less time than that.
"""

from __future__ import annotations

import doctest
import importlib
import math
import os
import re
import runpy
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add what the layer makes of the values."""
        return values + torch.relu(self.layer(values))


class Net(nn.Module):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit."""
        return self.head(self.blocks(values))


class Progress:
    """An object of the user's that has a state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Put a state back."""
        self.seen = state["seen"]


@cache
def digits(count: int = 64) -> TensorDataset:
    """Return some of the handwritten digits that ship with scikit-learn, whose import takes longer than most pages."""
    library = find_spec("sklearn")
    assert library is not None, "scikit-learn is not installed"
    assert library.origin is not None, "scikit-learn is not installed"
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
    found = torch.from_numpy(numpy.loadtxt(file, delimiter=",", max_rows=count))
    return TensorDataset(found[:, :-1].float() / 16, found[:, -1].long())


def write_files(folder: Path) -> None:
    """Put the files there that pages speak of: a script, a package, a configuration, a checkpoint."""
    from safetensors.torch import save_file

    (folder / "train.py").write_text(
        "import argparse\nfrom accel import Accelerator\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\nparser.add_argument('--epochs')\n"
        "parser.parse_args()\naccelerator = Accelerator(cpu=True)\naccelerator.wait_for_everyone()\n"
        "accelerator.print('trained on', accelerator.num_processes)\naccelerator.end_training()\n"
    )
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "train.py").write_text((folder / "train.py").read_text())
    (folder / "config.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nnum_processors: 2\n")
    (folder / "checkpoint").mkdir()
    save_file(Net().state_dict(), folder / "checkpoint" / "model.safetensors")


def scene(folder: Path, page: str, *, own: bool = False) -> dict[str, Any]:
    """Return the names that a block may use without defining them; with `own` it makes the Accelerator itself."""
    from accel_core.accelerator import Accelerator
    from accel_core.errors import CheckpointNotFoundError
    from accel_core.plugins.loading import DataLoaderConfiguration
    from accel_core.plugins.project import ProjectConfiguration
    from accel_core.state.gradient import GradientState
    from accel_core.state.process import PartialState
    from accel_core.state.run import AcceleratorState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = None if own else Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = digits()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return {
        "Accelerator": Accelerator, "ProjectConfiguration": ProjectConfiguration, "Block": Block, "Net": Net,
        "DataLoaderConfiguration": DataLoaderConfiguration, "CheckpointNotFoundError": CheckpointNotFoundError,
        "DataLoader": DataLoader, "torch": torch, "math": math,
        "cross_entropy": cross_entropy, "loss_function": cross_entropy,
        "accelerator": accelerator, "model": model, "optimizer": optimizer, "schedule": schedule, "data": data,
        "loader": DataLoader(data, batch_size=16), "test_loader": DataLoader(data, batch_size=16),
        "right": 0, "asked": 0, "requests": [torch.rand(2, 64) for _ in range(4)],
        "EPOCHS": 2, "epochs": 2, "accumulation": 2, "warm_up_then_cosine": lambda steps: lambda step: 1 - step / steps,
        "progress": Progress(), "step": 0, "loss": torch.tensor(1.0), "something_long": range(2), "folder": folder,
    }  # fmt: skip


def run_examples(modules: list[str], folder: Path, variables: dict[str, str]) -> None:
    """Run the examples in docstrings of modules inside a folder, each in its own scene, and leave this process.

    `folder/printed` then holds what failed, and how many examples there were.
    """
    enter(folder, variables)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for name in modules:
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
            if test.examples:
                own = any("Accelerator(" in example.source for example in test.examples)
                os.environ.clear()
                os.environ.update(variables)
                test.globs = scene(folder, name, own=own) | _defined_in(module) | {"__name__": "__main__"}
                runner.run(test)
    print(f"{runner.tries} examples, {runner.failures} failed", flush=True)


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Return what a module defines, without what it imports: an example imports the rest."""
    return {
        name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    }


def enter(folder: Path, variables: dict[str, str]) -> None:
    """Make a folder and an environment this process's own, and `folder/printed` its output."""
    for stream in (1, 2):
        os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def name_of(source: str) -> str:
    """Return the name of the file that a block is, by its first line `# NAME.py` or `# NAME.yaml`, or nothing."""
    name = re.match(r"# (\w+\.(?:py|yaml))\n", source)
    return name[1] if name else ""


def keep_as_file(source: str, folder: Path) -> None:
    """Write a block that begins with the name of a file into that file."""
    if name_of(source):
        (folder / name_of(source)).write_text(source)


def run_file(arguments: list[str], folder: Path, variables: dict[str, str]) -> None:
    """Do what `python FILE ARGUMENTS` does inside a folder, and leave this process."""
    enter(folder, variables)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def run_session(blocks: list[tuple[str, str]], folder: Path, variables: dict[str, str]) -> None:
    """Run blocks of [title, source] one after the other, as somebody who pastes them into one interpreter."""
    enter(folder, variables)
    names: dict[str, Any] = {"__name__": "__main__"}
    for title, source in blocks:
        exec(compile(source, title, "exec"), names)
        print(f"ran {title}", flush=True)


def run_blocks(blocks: list[tuple[str, str]], folder: Path, variables: dict[str, str]) -> None:
    """Run blocks of [title, source] inside a folder, each in a namespace of its own, and leave this process.

    One that has the name of a file takes no names of the scene: it is copied as it is.

    `folder/printed` then holds what they printed, the title of each that ran to its end, and what the last one raised.
    """
    enter(folder, variables)
    for title, source in blocks:
        keep_as_file(source, folder)
        names = ({} if name_of(source) else scene(folder, title)) | {"__name__": "__main__"}
        exec(compile(source, title, "exec"), names)
        print(f"ran {title}", flush=True)
