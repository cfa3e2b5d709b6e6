"""Scripts whose main process saves alone, as the training scripts of diffusers do, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_core.host.ports import get_free_port
from accel_testing import limits

SCRIPT = """
import json, os, shutil, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

folder, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=ProjectConfiguration(folder))
set_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def write(models, weights, output_dir):
    if accelerator.is_main_process:
        for each in models:
            torch.save(accelerator.unwrap_model(each).state_dict(), os.path.join(output_dir, "unet.pt"))
            weights.pop()

def read(models, input_dir):
    while models:
        state = torch.load(os.path.join(input_dir, "unet.pt"), weights_only=True)
        accelerator.unwrap_model(models.pop()).load_state_dict(state)

accelerator.register_save_state_pre_hook(write)
accelerator.register_load_state_pre_hook(read)
model, optimizer = accelerator.prepare(model, optimizer)
global_step = 0
if resume:
    last = sorted((name for name in os.listdir(folder) if name.startswith("checkpoint")), key=lambda n: int(n[11:]))[-1]
    accelerator.load_state(os.path.join(folder, last))
    global_step = int(last[11:])
batch = 2 * global_step
while global_step < steps:
    with accelerator.accumulate(model):
        loss = model(torch.full((2, 4), 1.0 + batch + accelerator.process_index)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    batch += 1
    if accelerator.sync_gradients:
        global_step += 1
        if accelerator.is_main_process:
            kept = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))
            for name in kept[:-1]:
                shutil.rmtree(os.path.join(folder, name))
            accelerator.save_state(os.path.join(folder, f"checkpoint-{global_step}"))
    accelerator.log({"loss": loss.detach().item()}, step=global_step)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    open(os.path.join(folder, "weights.json"), "w").write(json.dumps(weights))
if "end_training" in sys.argv:
    accelerator.end_training()
elif "main last" in sys.argv and accelerator.is_main_process:
    accelerator.save_state(os.path.join(folder, f"checkpoint-{global_step}"))
elif "main first" in sys.argv and not accelerator.is_main_process:
    sys.stdin.read()
"""


def variables() -> dict[str, str]:
    """Return the environment without what another launcher of this process put there."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def by_launcher(words: list[str]) -> None:
    """Run a script on two ranks by `accelerate launch`, whose own process has the store."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = limits.run([*command, *words], env=variables(), stdin=subprocess.DEVNULL, quiet=30)
    assert done.returncode == 0, done.stderr


def by_itself(words: list[str]) -> None:
    """Run a script on two ranks, of which rank 0 serves the store and ends first; neither prints errors of it."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    meeting |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            env=variables() | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = limits.communicate(rank, quiet=30)
            assert rank.returncode == 0, errors
            assert "TCPStore" not in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("start", "ending"),
    [
        pytest.param(by_launcher, "end_training", marks=pytest.mark.full("another case of a grid")),
        pytest.param(by_launcher, "main last", marks=pytest.mark.full("another case of a grid")),
        (by_itself, "main first"),
    ],
)
def test_a_script_whose_main_process_saves_alone_resumes(start: Any, ending: str, tmp_path: Path) -> None:
    """It keeps the newest checkpoints, ends on all ranks, and a resumed run ends with the weights of one in a go."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    runs = {"whole": [("4", "new")], "resumed": [("2", "new"), ("4", "resume")]}
    found = []
    for name in runs if ending == "end_training" else ["whole"]:
        (tmp_path / name).mkdir()
        for steps, how in runs[name]:
            start([str(script), str(tmp_path / name), steps, how, ending])
        assert sorted(os.listdir(tmp_path / name)) == ["checkpoint-3", "checkpoint-4", "weights.json"]
        found.append(json.loads((tmp_path / name / "weights.json").read_text()))
    assert found[0] == found[-1]
