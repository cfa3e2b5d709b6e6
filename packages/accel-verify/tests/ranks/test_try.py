"""`accel try` on an example, a script of transformers, and one that hangs on two ranks."""

from __future__ import annotations

import io
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.devices.cpu import CpuDevice
from accel_core.errors import ConfigurationError
from accel_launch.cli import main
from accel_testing import limits, requires
from accel_verify.parallel.report import Verdict
from accel_verify.recorder import Finished
from accel_verify.trial.clock import TrainingClock
from accel_verify.trial.gpu import memory_of_gpu

ROOT = Path(__file__).parents[4]
DIGITS = ROOT / "examples" / "train_digits.py"

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=8, use_cpu=True, report_to=[], save_strategy="no"
)
Trainer(model=model, args=arguments, train_dataset=data).train()
"""

LONELY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel_core.accelerator import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    if accelerator.is_main_process:
        print(accelerator.gather(loss))
    optimizer.step()
    optimizer.zero_grad()
"""


def lines_of(printed: str) -> dict[str, str]:
    """Return what is said under each of the first words."""
    return {line[:14].strip(): line[15:] for line in printed.splitlines() if line[:1].strip()}


@requires("engine:fsdp", "accel")
@pytest.mark.skipif(not DIGITS.exists(), reason="only in the repository")
def test_an_example_is_equal_and_its_memory_known(tmp_path: Path, accel) -> None:
    """The digits train alike on two ranks; speed, memory on a GPU and the line that launches them are shown."""
    for name in ("train_digits.py", "digits.py"):
        shutil.copy(DIGITS.with_name(name), tmp_path)
    found = lines_of(accel("try", "--cpu", "--gpu", "A100-80GB", "train_digits.py", quiet=60, status=0).stdout)
    assert found["equal"].startswith("3 optimizer steps on one process and on dp2")
    assert "samples/s on one process" in found["speed"]
    assert found["memory"].endswith("MiB of 80.00 GiB on one A100-80GB")
    assert found["launch"] == "accel launch train_digits.py"
    assert not (tmp_path / "runs" / "digits" / "model").exists(), "nothing is saved"


@requires("transformers")
def test_a_trainer_of_transformers_is_equal(tmp_path: Path, accel) -> None:
    """The loop need not be the script's own; that it seeds all ranks alike is mentioned."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    found = lines_of(accel("try", "--cpu", "trainer.py", quiet=60, status=0).stdout)
    assert "losses, gradients and weights agree; dropout: ranks 0 and 1 draw the same masks" in found["equal"]
    assert found["launch"] == "accel launch --cpu --num-processes 2 trainer.py"


@pytest.mark.parametrize(
    ("gpus", "words", "on_cpu"), [(0, [], False), (1, [], True), (2, [], False), (1, ["--cpu"], True)]
)
def test_ranks_that_would_share_a_gpu_compare_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int, words: list[str], on_cpu: bool
) -> None:
    """One GPU times the script, and is used by what is launched afterwards; two ranks do not share it."""
    asked: dict[str, Any] = {}

    def verified(*_: object, **arguments: Any) -> SimpleNamespace:
        asked.update(arguments)
        return SimpleNamespace(verdicts=[Verdict("dp2", 2, 2, numbers={}, state="equal", message="")])

    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: gpus)
    monkeypatch.setattr("accel_verify.trial.run._clocked", lambda *_: {"steps": 0, "samples": 0})
    monkeypatch.setattr("accel_verify.trial.run.verify_parallel", verified)
    assert main(["try", *words, str(DIGITS)]) == 0
    found = lines_of(capsys.readouterr().out)
    assert asked["cpu"] is on_cpu
    assert found["equal"].endswith("agree" + "; compared on the CPU, as dp2 takes 2 GPUs" * (on_cpu and not words))
    assert ("--cpu" in found["launch"]) == (not gpus)


@pytest.mark.usefixtures("fresh_state")
def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds end when the last step is computed, and not when it was given to the device."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    clock, queued = TrainingClock(io.StringIO()), 0.5
    clock._begun(lambda *_: None, accelerator)
    monkeypatch.setattr(CpuDevice, "synchronize", lambda _: time.sleep(queued))
    with pytest.raises(Finished):
        [clock.stepped(lambda *_: None, optimizer) for _ in range(100)]
    assert clock.seconds >= queued


def test_a_gather_on_one_rank_alone_is_found(tmp_path: Path, accel) -> None:
    """Two ranks hang; the lines of the script on which they stand are named, with the question that helps."""
    (tmp_path / "lonely.py").write_text(LONELY)
    words = ("try", "--cpu", "--timeout", str(20 * limits.slowness()), "lonely.py")
    found = lines_of(accel(*words, quiet=90, forked=False, status=1).stdout)  # a fork prints no stack at SIGABRT
    gather = LONELY.splitlines().index("        print(accelerator.gather(loss))") + 1
    assert f"rank 0 at lonely.py:{gather}" in found["failed"]
    assert "Is there a call that only some ranks make?" in found["failed"]
    assert found["launch"] == "accel launch --num-processes 1 lonely.py, until that is fixed"


@pytest.mark.parametrize(("name", "gib"), [("A100-80GB", 80), ("24GB", 24), ("l4", 24), ("rtx 4090", 24)])
def test_a_gpu_is_known_by_name_or_size(name: str, gib: int) -> None:
    """The size in the name counts, then the size that all GPUs of that name have."""
    assert memory_of_gpu(name) == gib * 2**30


def test_an_unknown_gpu_is_refused() -> None:
    """A name that says no size and is not known names those that are."""
    with pytest.raises(ConfigurationError, match=r"got 'A100'. Name the size, as in A100-80GB"):
        memory_of_gpu("A100")
    with pytest.raises(ConfigurationError, match=r"got 'A101-80GB'. Did you mean A10 or A10G or A100\? Name"):
        memory_of_gpu("A101-80GB")
