"""A checkpoint that another process deletes while it is read."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import commit
from accel_core.errors import CheckpointError
from accel_core.plugins.project import ProjectConfiguration

pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.slow]

LOOKS = ((os, "stat"), (os, "lstat"), (os, "scandir"), (os, "listdir"), (os, "open"), (io, "open"))
POINTS = 24


class Series:
    """Two checkpoints, and a third that replaces them at one of the looks that a load takes at the disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.kept, self.later = folder / "checkpoints", folder / "kept", folder / "later"
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.model = self.accelerator.prepare(torch.nn.Linear(2, 2))
        for number in range(3):
            with torch.no_grad():
                self.model.weight.fill_(number)
            self.accelerator.save_state()
        shutil.copytree(self.folder, self.kept)
        self.looks, self.when, self.busy = 0, 0, False
        for module, name in LOOKS:
            monkeypatch.setattr(module, name, self.watching(getattr(module, name)))

    def watching(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the system that lets the other process work before the look whose turn it is."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.busy:
                self.looks += 1
                if self.looks == self.when:
                    self.busy = True
                    os.rename(self.later, self.folder / "checkpoint_2")
                    commit.prune(self.folder / "checkpoint_2", 1)
                    self.busy = False
            return look(*args, **kwargs)

        return watched

    def load(self, name: str | None, when: int) -> float:
        """Load with the other process at work at that look (0: never), and return the weight that came of it."""
        self.busy = True
        for place in (self.folder, self.later):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.kept, self.folder)
        os.rename(self.folder / "checkpoint_2", self.later)
        self.looks, self.when, self.busy = 0, when, False
        self.accelerator.load_state(None if name is None else str(self.folder / name))
        return float(self.model.weight[0, 0].item())


def test_the_latest_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the latest checkpoint is deleted for a newer one, one of the two is loaded."""
    series = Series(tmp_path, monkeypatch)
    assert series.load(None, 0) == 1
    loaded = {series.load(None, 1 + point * series.looks // POINTS) for point in range(POINTS)}
    assert loaded <= {1, 2}
    assert 2 in loaded


def test_a_checkpoint_that_was_named_and_deleted_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any look it is loaded, or refused by one of our errors, and then the weights are as before."""
    series = Series(tmp_path, monkeypatch)
    assert series.load("checkpoint_0", 0) == 0
    refused = 0
    for point in range(POINTS):
        with torch.no_grad():
            series.model.weight.fill_(7)
        try:
            assert series.load("checkpoint_0", 1 + point * series.looks // POINTS) == 0
        except CheckpointError:
            refused += 1
            assert bool((series.model.weight == 7).all())
    assert refused > POINTS // 2


@pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError])
def test_a_folder_that_goes_while_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """The last question, whether the save that was read still counts, is asked of a folder that just went."""
    series = Series(tmp_path, monkeypatch)
    found, asked = commit.saves_of, []

    def saves_of(target: Path, *shares: Any) -> list[commit.FoundSave]:
        asked.append(target)
        if len(asked) == 2:
            raise error(2, "gone", str(target))
        return found(target, *shares)

    monkeypatch.setattr(commit, "saves_of", saves_of)
    assert series.load("checkpoint_1", 0) == 1
    assert len(asked) > 2
