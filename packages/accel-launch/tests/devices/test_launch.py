"""The launcher and its commands on a machine with one GPU, as a user starts them."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_testing import limits

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[4]
ONE_GPU = pytest.mark.skipif(
    DEVICE.type == "cpu" or torch.cuda.device_count() != 1, reason="needs a machine with one CUDA device"
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WHERE = """
import json, sys, torch
from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import InitProcessGroupKwargs
handlers = [InitProcessGroupKwargs(backend="gloo")] if "gloo" in sys.argv else []
accelerator = Accelerator(kwargs_handlers=handlers)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(3, 4, device=accelerator.device)).square().mean())
optimizer.step()
ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
if accelerator.is_main_process:
    places = [str(accelerator.device), str(next(model.parameters()).device)]
    print(json.dumps([*places, ranks, accelerator.mixed_precision]))
accelerator.end_training()
"""
DIGITS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import train_digits
made = train_digits.Accelerator
train_digits.Accelerator = lambda log_with, **given: made(**given)  # trackers need not be installed
train_digits.main()
"""


def said(text: str) -> list[Any]:
    """Return what the script told of itself."""
    (line,) = (line for line in text.splitlines() if line.startswith("["))
    return list(json.loads(line))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [DEVICE, DEVICE, [0], "no"]),
        (["--num-processes", "1", "--mixed-precision", "bf16"], [DEVICE, DEVICE, [0], "bf16"]),
        (["--gpu-ids", "0"], [DEVICE, DEVICE, [0], "no"]),
        (["--config-file", "one.yaml"], [DEVICE, DEVICE, [0], "fp16"]),
        (["--cpu"], ["cpu", "cpu", [0], "no"]),
        (["--cpu", "--num-processes", "2"], ["cpu", "cpu", [0, 1], "no"]),
    ],
)
def test_a_script_runs_where_it_was_started(
    words: list[str], expected: list[Any], accel, script, tmp_path: Path
) -> None:
    """On the GPU by default, by its number, and by a file for several GPUs of which there is one; else on the CPU."""
    (tmp_path / "one.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 1\nmixed_precision: fp16\n")
    done = accel("launch", *words, script(WHERE), forked=False, status=0)
    assert said(done.stdout) == [str(each) if isinstance(each, torch.device) else each for each in expected]


@ONE_GPU
def test_two_ranks_of_nccl_are_refused(accel, script) -> None:
    """On one GPU the run ends with what was found and what to do, and not with an error of NCCL."""
    done = accel("launch", "--num-processes", "2", script(WHERE), forked=False)
    assert done.returncode != 0
    assert re.search(r"NCCL takes one rank for each GPU; got ranks [01] and [01] on cuda:0.*--cpu.*gloo", done.stderr)
    assert "Duplicate GPU" not in done.stderr


@ONE_GPU
def test_two_ranks_over_gloo_share_the_device(accel, script) -> None:
    """Where the script asks for gloo, both ranks train on the one GPU."""
    done = accel("launch", "--num-processes", "2", script(WHERE), "gloo", forked=False, status=0)
    assert said(done.stdout) == [str(DEVICE), str(DEVICE), [0, 1], "no"]


@ONE_GPU
def test_several_gpus_asked_for_are_refused(accel, script) -> None:
    """`--multi-gpu` on a machine with one GPU says how many processes it would make."""
    done = accel("launch", "--multi-gpu", script(WHERE))
    assert done.returncode != 0
    assert "--multi-gpu needs at least 2 processes; got 1" in done.stderr


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs the library sklearn, not installed here")
def test_the_example_learns_and_resumes(accel, script) -> None:
    """It reaches its accuracy, which it checks itself, and resumed from the middle ends with the same weights."""
    name = script(DIGITS, "digits_here.py")
    for more in ([], ["--resume"]):
        done = accel("launch", name, str(ROOT / "examples"), *more, forked=False, quiet=30, status=0)
        found = re.search(r"test accuracy +(0\.\d+)", done.stdout)
        assert found is not None, done.stdout
        assert float(found[1]) >= 0.97
    assert "True, bit for bit" in done.stdout


def test_env_names_the_device(accel) -> None:
    """Its report has the name of the GPU and the version of CUDA, as a person and as a program read it."""
    shown, read = accel("env", status=0), accel("env", "--json", status=0)
    facts = json.loads(read.stdout)["facts"]
    if DEVICE.type != "cpu":
        assert facts["GPU type"] == torch.cuda.get_device_name(DEVICE)
        assert f"- GPU type: {facts['GPU type']}" in shown.stdout
        assert facts["Accelerators"] == torch.cuda.device_count()


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_the_check_runs_on_the_device(accel, tmp_path: Path, precision: str) -> None:
    """`accel test` with a configuration for the GPU gathers, splits and trains there, in each precision."""
    (tmp_path / "one.yaml").write_text(
        f"distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: false\nmixed_precision: '{precision}'\n"
    )
    done = accel("test", "--config_file", "one.yaml", forked=False, status=0)
    assert f"training is alike: holds for 1 process on {DEVICE}" in done.stdout
    assert "The check passed" in done.stdout


@pytest.fixture
def announced(tmp_path: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return variables under which commands of accel-verify are found where it is not installed but on the path."""
    tomllib = pytest.importorskip("tomllib")
    package = ROOT / "packages" / "accel-verify" / "pyproject.toml"
    points = tomllib.loads(package.read_text())["project"]["entry-points"]
    folder = tmp_path / "announced" / "accel_verify-0.dist-info"
    folder.mkdir(parents=True)
    text = "".join(
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in points.items()
    )
    (folder / "entry_points.txt").write_text(text)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-verify\nVersion: 0\n")
    return {"PYTHONPATH": f"{folder.parent}:{variables.get('PYTHONPATH', '')}"}


def test_doctor_finds_that_the_device_computes(accel, announced: dict[str, str]) -> None:
    """It starts no ranks, and says that the GPU was tried."""
    done = accel("doctor", "--json", "--no_collective", more=announced, forked=False, quiet=30)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    told = json.dumps(json.loads(done.stdout))
    if DEVICE.type != "cpu":
        assert torch.cuda.get_device_name(DEVICE) in told
        assert "does not compute" not in told


NOTEBOOK = """
def train(offset):
    from accel_core.accelerator import Accelerator
    accelerator = Accelerator()
    print(f"{accelerator.device} {accelerator.num_processes} {accelerator.mixed_precision} {offset}")
from accel_launch.notebook import notebook_launcher
notebook_launcher(train, (5,), num_processes=1, mixed_precision="bf16")
"""


def test_a_notebook_uses_the_device(tmp_path: Path, variables: dict[str, str]) -> None:
    """`notebook_launcher` with one process runs the function on the GPU."""
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = limits.run([sys.executable, "cells.py"], cwd=tmp_path, env=variables, check=True)
    assert done.stdout.split() == [str(DEVICE), "1", "bf16", "5"]
