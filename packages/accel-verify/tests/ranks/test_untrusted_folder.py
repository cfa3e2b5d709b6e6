"""Commands that are started in a folder of somebody else, which holds modules of well-known names."""

import os
import subprocess
from pathlib import Path

import pytest

from accel_core.host.program.run_module import own_command
from accel_testing import limits

TRAP = "import pathlib, sys; pathlib.Path(__file__).with_name('caught').open('a').write(__name__ + ' ')\nsys.exit(1)\n"
NAMES = ("torch", "yaml", "json", "numpy", "runpy", "tempfile", "questionary", "accel_core", "accel_launch")

SCRIPT = """
import os
import neighbor
import torch
from accel_core import Accelerator
assert "PYTHONSAFEPATH" not in os.environ
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(neighbor.data(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for (batch,) in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
NEIGHBOR = """
import torch
def data():
    return torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2))
"""


OTHERS = pytest.mark.full("another case of a grid")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["doctor"], marks=OTHERS),
        pytest.param(["check-resume", "--cpu", "--steps", "2", "--at", "1", "SCRIPT"], marks=OTHERS),
        pytest.param(["verify-parallel", "--cpu", "--steps", "1", "--layouts", "dp2", "SCRIPT"], marks=OTHERS),
        pytest.param(["test"], marks=OTHERS),
        ["launch", "--cpu", "--num-processes", "2", "SCRIPT"],
    ],
    ids=lambda words: words[0],
)
def test_nothing_of_the_current_folder_runs(tmp_path: Path, variables: dict[str, str], words: list[str]) -> None:
    """No process of a command takes a module from the folder it was started in; a script has its own folder's."""
    untrusted, own = tmp_path / "untrusted", tmp_path / "own"
    untrusted.mkdir()
    own.mkdir()
    for name in NAMES:
        (untrusted / f"{name}.py").write_text(TRAP)
    (own / "neighbor.py").write_text(NEIGHBOR)
    (own / "train.py").write_text(SCRIPT)
    named = [os.fspath(own / "train.py") if word == "SCRIPT" else word for word in words]
    command = own_command("accel_launch", *named)
    done = limits.run(command, cwd=untrusted, env=variables, stdin=subprocess.DEVNULL, quiet=30)
    caught = untrusted / "caught"
    assert not caught.exists(), caught.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
