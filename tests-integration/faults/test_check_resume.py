"""`accel check-resume` on scripts that resume exactly and on scripts that do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires
from accel_testing.programs import ProgramAndRanks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"

SCRIPT = """
import pathlib
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from accel_core.accelerator import Accelerator

class Numbers(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.full((3,), float(index))

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
{sampler}
loader = DataLoader(Numbers(), batch_size=2, {choice})
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(4):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
PIPELINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel_core.accelerator import Accelerator
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.pipeline.kwargs import PipelineKwargs

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
    def forward(self, values):
        return values + torch.tanh(self.layer(values))

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    parallelism_config=ParallelismConfig(pp_size=2),
    kwargs_handlers=[PipelineKwargs("zbv_zero_bubble", 4, loss_fn=lambda outputs, batch: outputs.pow(2).mean())],
)
torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=8, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(4):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
SHUFFLED = SCRIPT.format(sampler="", choice="shuffle=True")
OTHER_ORDER = """
class Own(torch.utils.data.Sampler):
    def __len__(self):
        return 24
    def __iter__(self):
        asked = pathlib.Path(__file__).with_name("asked")
        with asked.open("a") as file:
            file.write(".")
        first = asked.stat().st_size  # no two runs begin with the same sample
        yield from [*range(first, 24), *range(first)]
"""


def check(
    script: Path, steps: int, at: int, *options: str, words: tuple[str, ...] = (), status: int = 0,
    begins: str = "identical",
) -> str:  # fmt: skip
    """Run the command, which ends with a status, on a script and its words; return what it printed, which begins so."""
    command = [sys.executable, "-m", "accel_launch", "check-resume", "--cpu", f"--steps={steps}", f"--at={at}"]
    done = limits.run([*command, *options, str(script), *words], quiet=24, started_by=ProgramAndRanks)
    printed = done.stdout + done.stderr
    assert (done.returncode, printed.startswith(begins)) == (status, True), printed
    return printed


def write(path: Path, sampler: str, choice: str) -> Path:
    """Write a script."""
    path.write_text(SCRIPT.format(sampler=sampler, choice=choice))
    return path


@pytest.mark.parametrize("source", [SHUFFLED, PIPELINE], ids=["dp", "pp"])
def test_a_script_that_resumes_exactly(tmp_path: Path, source: str) -> None:
    """Mid-epoch, with dropout, accumulation and a schedule, or in two stages of a pipeline: identical."""
    script = tmp_path / "train.py"
    script.write_text(source)
    words = check(script, 9, 4, "--num-processes", "2")
    assert "load_state restored the position of loaders" in words


def test_a_script_written_for_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the drop-in, one that does not skip differs at its first step; with the variable it is identical."""
    script = write(tmp_path / "train.py", "", "shuffle=True, generator=torch.Generator()")
    script.write_text(script.read_text().replace("from accel_core.accelerator", "from accelerate"))
    words = check(script, 6, 4, status=1, begins="step 5, rank 0: data order differs")
    assert "load_state left loaders at the start of an epoch" in words
    monkeypatch.setenv("ACCEL_RESTORE_POSITION", "yes")
    check(script, 6, 4)


@pytest.mark.full("another case of a grid")
def test_a_script_that_skips_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the drop-in, one that loads and skips is identical, without the loaders being moved."""
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path / "train.py", "", "shuffle=True, generator=torch.Generator()")
    text = script.read_text().replace("from accel_core.accelerator import", "from accelerate import")
    text = text.replace(
        "Accelerator(gradient_accumulation_steps=2)",
        "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), project_config=\n"
        "    ProjectConfiguration(project_dir='run', automatic_checkpoint_naming=True, total_limit=2))",
    ).replace("torch.nn.Dropout(0.5)", "torch.nn.ReLU()")
    head, loop = text.split("for epoch in range(4):")
    script.write_text(
        "from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration\n"
        f"{head}try:\n    accelerator.load_state()\nexcept FileNotFoundError:\n    pass\n"
        "done = round(schedule.scheduler.last_epoch)\n"
        "for epoch in range(done // 12, 4):\n"
        "    loader.set_epoch(epoch)\n"
        "    rest = accelerator.skip_first_batches(loader, done % 12) if epoch == done // 12 else loader"
        f"{loop.replace('in loader', 'in rest')}        accelerator.save_state()\n"
    )
    words = check(script, 9, 7)
    assert "load_state left loaders at the start of an epoch" in words


@pytest.mark.full("another case of a grid")
def test_automatic_names_and_a_script_that_resumes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern of the guide: identical, and the project's own folder is neither read nor written."""
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path / "train.py", "", "shuffle=True")
    text = script.read_text().replace(
        "Accelerator(gradient_accumulation_steps=2)",
        "Accelerator(gradient_accumulation_steps=2, project_config=ProjectConfiguration(\n"
        "    project_dir='run', automatic_checkpoint_naming=True, total_limit=2))",
    )
    resume = "try:\n    accelerator.load_state()\nexcept CheckpointNotFoundError:\n    accelerator.print('none')\n"
    text = text.replace("for epoch in range(4):", f"{resume}for epoch in range(loader.iteration, 4):")
    heads = "from accel_core.errors import CheckpointNotFoundError\nfrom accel_core.plugins.project import *\n"
    script.write_text(f"{heads}{text}    accelerator.save_state()\n")
    check(script, 9, 7)
    assert not (tmp_path / "run").exists()


def test_a_script_whose_data_order_differs(tmp_path: Path) -> None:
    """A sampler that nobody can replay is found at the first step, with its name, and the status is 1."""
    script = write(tmp_path / "train.py", OTHER_ORDER, "sampler=Own()")
    words = check(script, 4, 2, status=1, begins="")
    assert "step 1, rank 0: data order differs: batch 0 of the step is" in words


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        pytest.param("Numbers()", "", marks=pytest.mark.full("another case of a grid")),
        ("torch.rand(24, 3)", "torch.rand"),
    ],
)
def test_data_drawn_without_a_seed_are_named(tmp_path: Path, drawn: str, named: str) -> None:
    """A real resume would train on other data; weights and orders without a seed are those of the checkpoint."""
    script = write(tmp_path / "train.py", "", "shuffle=True")
    text = script.read_text().replace("torch.manual_seed(0)\n", "").replace("Numbers(),", f"{drawn},")
    script.write_text(text)
    if not named:
        check(script, 4, 2)
        return
    words = check(script, 4, 2, status=1, begins="not comparable: a layer at ")
    line = next(number for number, each in enumerate(text.splitlines(), 1) if named in each)
    assert f"`{named}` at {script}:{line}" in words.splitlines()[0]
    assert words.splitlines()[1].startswith("step 3, rank 0: data order differs")


def test_wrong_arguments_and_scripts_are_named(tmp_path: Path) -> None:
    """An interruption outside the run, no script, a script that fails and one that is too short."""
    script = write(tmp_path / "train.py", "", "shuffle=True")
    (tmp_path / "broken.py").write_text("raise KeyError('mine')")
    for wrong, at, status, told in (
        (script, 4, 2, "Choose 0 < at < steps"),
        (tmp_path / "no.py", 2, 2, "The script does not exist"),
        (tmp_path / "broken.py", 2, 1, "KeyError: 'mine'"),
    ):
        assert told in check(wrong, 4, at, status=status, begins="")


OTHER_WAYS = pytest.mark.full("another case of a grid")


@pytest.mark.parametrize(
    ("way", "ranks", "made"),
    [
        ("import os; os._exit(0)", "1", 0),
        ("pass", "1", 0),
        ("sys.exit(0)", "2", 0),
        *(pytest.param(way, "1", 0, marks=OTHER_WAYS) for way in ("sys.exit(0)", "sys.exit()", "raise SystemExit")),
        pytest.param("import os; os._exit(0)", "2", 0, marks=OTHER_WAYS),
        (f"{SHUFFLED.replace('range(4)', 'range(1)')}\nsys.exit(0)", "1", 6),
    ],
)
def test_a_script_that_leaves_too_soon(tmp_path: Path, way: str, ranks: str, made: int) -> None:
    """One that leaves with success before all steps is not identical to anything, and is told how many it made."""
    (tmp_path / "idle.py").write_text(f"import sys\n{way}\n")
    words = check(tmp_path / "idle.py", 9, 4, "--num-processes", ranks, status=1, begins="")
    assert f"made {made} optimizer steps of 9" in words
    assert "identical" not in words


@pytest.mark.full("a whole training")
@requires("sklearn", "tensorboard", "tqdm")
def test_the_example_resumes_exactly(tmp_path: Path) -> None:
    """The quickstart's training script, interrupted in the middle of an epoch."""
    check(EXAMPLE, 6, 3, "--num-processes", "2", words=("--folder", str(tmp_path / "runs")))
