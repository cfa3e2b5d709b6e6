"""Progress bars in one process."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.environ import patch_environment
from accel_core.tqdm import on_terminal, tqdm
from accel_testing import requires


@requires("tqdm")
def test_a_bar_shows_and_can_be_hidden():
    """The first process of a machine shows a bar unless it is disabled, others on request; a flag in front is told."""
    shown, hidden, others = io.StringIO(), io.StringIO(), io.StringIO()
    assert list(tqdm([1, 2], file=shown)) == [1, 2]
    assert list(tqdm([1, 2], file=hidden, disable=True)) == [1, 2]
    with patch_environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1):
        list(tqdm([1], file=hidden))
        list(tqdm([1], file=others, main_process_only=False))
    assert "2/2" in shown.getvalue()
    assert others.getvalue()
    assert hidden.getvalue() == ""
    with pytest.raises(ConfigurationError, match=r"got True\. Say which processes .* main_process_only"):
        tqdm(True, [1])


@requires("tqdm")
def test_what_takes_long_has_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch):
    """Elsewhere the items come back as they are; on a terminal the bar gives them, and is gone when it is full."""
    items = [1, 2]
    assert on_terminal(items, "Writing") is items
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = on_terminal(items, "Writing")
    assert (bar.total, bar.leave, list(bar)) == (2, False, items)


@requires("tqdm")
def test_one_bar_counts_the_bytes_of_a_whole_checkpoint(
    fresh_state, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves of a state, its loads and saves of weights each show one bar, whose bytes are those of the files."""
    bars = []

    def shown(settings: dict) -> list:
        bars.append(tqdm(**settings, file=io.StringIO()))
        return bars[-1:]

    monkeypatch.setattr("accel_core.tqdm._on_terminal", shown)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 64)).sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "model"))
    assert [(bar.desc, bar.unit) for bar in bars] == [("Saving", "B"), ("Loading", "B"), ("Saving", "B")]
    saved, loaded, weights = bars
    files = {path.name: path.stat().st_size for path in (tmp_path / "state").iterdir() if path.is_file()}
    assert saved.n >= sum(files.values()) > 3 * 4 * 64 * 64, "the states of the optimizer count too"
    assert loaded.n == loaded.total == sum(files.values()) - files["accel_manifest.json"]
    assert weights.total == 4 * (64 * 64 + 64)


@requires("tqdm")
def test_the_bar_of_a_resumed_epoch_ends_full(fresh_state):
    """A loader that goes on inside an epoch, after three of its five steps, fills the rest of the bar."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2))
    for step, _ in enumerate(loader, 1):
        if step == 3:
            position = loader.cursor.state_dict()
            break
    loader.cursor.load_state_dict(position)
    bar = tqdm(loader, file=io.StringIO())
    assert (bar.n, bar.total, loader.steps_done) == (3, 5, 3)
    assert len(list(bar)) == 2
    assert bar.n == bar.total
    assert loader.steps_done == 0
    assert tqdm(loader, file=io.StringIO()).n == 0


def test_without_the_library(monkeypatch):
    """Without tqdm the error says what to install."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingDependencyError, match="pip install tqdm"):
        tqdm([1])
