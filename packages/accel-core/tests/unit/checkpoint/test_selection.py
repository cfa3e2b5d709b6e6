"""Checkpoints of a part of a run: models alone, and the adapters of PEFT models."""

from pathlib import Path

import pytest
import torch
from small_run import build

from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.save import save_state
from accel_core.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_the_model_alone_is_saved_and_loaded_as_that(tmp_path: Path) -> None:
    """`parts=("model",)` writes weights alone; loading changes the model and nothing else, and says so."""
    save_state(build(3.0), tmp_path / "part", parts=("model",))
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == [
        "accel_manifest.json", "accel_parts.json", "model.safetensors",
    ]  # fmt: skip
    run = build(5.0)
    moments, random = run.optimizers[0].state_dict()["state"][0]["exp_avg"].clone(), torch.get_rng_state()
    report = load_state(run, tmp_path / "part")
    assert (report.part, report.restored, report.findings) == ("model", ["model 0"], [])
    assert {float(each) for each in run.models[0].weight.detach().flatten()} == {3.0}
    assert torch.equal(run.optimizers[0].state_dict()["state"][0]["exp_avg"], moments)
    assert torch.equal(torch.get_rng_state(), random)
    assert run.step == 5


def test_a_whole_save_over_a_part_is_whole(tmp_path: Path) -> None:
    """What says that a checkpoint is a part goes when all of a run is saved there."""
    save_state(build(3.0), tmp_path / "run", parts=["model"])
    save_state(build(4.0), tmp_path / "run")
    report = load_state(build(9.0), tmp_path / "run")
    assert report.part is None
    assert "optimizer 0" in report.restored


def test_a_part_is_not_numbered(tmp_path: Path) -> None:
    """A part goes into a folder of its own, and the number of the next checkpoint stays."""
    run = build(3.0, project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    save_state(run)
    save_state(run, tmp_path / "part", parts=("model",))
    assert run.project.iteration == 1
    assert run.optimizers
    report = load_state(build(9.0, project_dir=str(tmp_path), automatic_checkpoint_naming=True))
    assert report.folder.name == "checkpoint_0"


@pytest.mark.parametrize(
    ("parts", "folder", "words"),
    [
        (("optimizer",), "part", "as parts="),
        (("model", "adapters"), "part", "as parts="),
        ((), "part", "as parts="),
        (("model",), None, "output_dir is None"),
        (("adapters",), "part", "Adapters are those of models that PEFT made; got a Linear"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    tmp_path: Path, parts: tuple[str, ...], folder: str | None, words: str
) -> None:
    """Other parts, no folder, and adapters of a model without any are errors by name, and nothing is written."""
    with pytest.raises(ConfigurationError, match=words):
        save_state(build(3.0), folder and tmp_path / folder, parts=parts)
    assert list(tmp_path.iterdir()) == []
