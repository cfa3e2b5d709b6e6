"""Scripts written for Accelerate resume on the drop-in: `load_state` moves no loader, and the script skips."""

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_testing import requires, world
from accelerate import Accelerator, _defaults
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, set_seed

LENGTH, SIZE, SEED = 23, 2, 7


@pytest.fixture(autouse=True)
def only_the_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test be a script that does not import accel, which other tests of this process may have."""
    monkeypatch.delitem(sys.modules, "accel", raising=False)


def prepared(**options: Any) -> tuple[Accelerator, Any]:
    """Return an Accelerator and its loader, as every start of a script makes them."""
    AcceleratorState._reset_state()
    _defaults.choose()
    shuffle = options.pop("shuffle", False)
    set_seed(SEED)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = DataLoader(range(LENGTH), batch_size=SIZE, shuffle=shuffle)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    return accelerator, loader


def interrupted(folder: Path, epoch: int, batches: int, **options: Any) -> None:
    """Read whole epochs and some batches of another one, and save; without any, after the last of them."""
    accelerator, loader = prepared(**options)
    for _ in range(epoch):
        assert list(loader)
    for _, number in zip(loader, range(1, batches + 1), strict=False):
        if number == batches:
            accelerator.save_state(str(folder))
    if not batches:
        accelerator.save_state(str(folder))


def values(loader: Any) -> list[list[int]]:
    """Return an epoch as lists."""
    return [batch.tolist() for batch in loader]


def share(order: list[int], rank: int, ranks: int) -> list[list[int]]:
    """Return every rank's batches of an order: in turn, the last global batch filled up from the start."""
    missing = -len(order) % (SIZE * ranks) if ranks > 1 else 0
    filled = order + order[:missing]
    return [filled[at : at + SIZE] for at in range(rank * SIZE, len(filled), SIZE * ranks)]


def check_epochs(folder: Path) -> None:
    """Interrupted anywhere: the next pass is a whole epoch, or without the batches that the script skips.

    It is the epoch that was interrupted, or the next one at a border.
    """
    options = {"shuffle": True, "use_seedable_sampler": True}
    accelerator, loader = prepared(**options)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    draws = [torch.Generator().manual_seed(SEED + epoch) for epoch in range(4)]
    parts = [share(torch.randperm(LENGTH, generator=draw).tolist(), rank, ranks) for draw in draws]
    whole = len(parts[0])
    for epoch, batches in ((1, 3), (0, whole), (2, 0)):
        place = folder / str(epoch)
        interrupted(place, epoch, batches, **options)
        at, done = epoch + batches // whole, batches % whole
        accelerator, loader = prepared(**options)
        accelerator.load_state(str(place))
        assert loader.iteration == at
        by_hand = [batch.tolist() for step, batch in enumerate(loader) if step >= done]
        assert by_hand == parts[at][done:]
        assert values(loader) == parts[at + 1]
        accelerator, loader = prepared(**options)
        accelerator.load_state(str(place))
        assert values(accelerator.skip_first_batches(loader, done)) == parts[at][done:]
        assert values(loader) == parts[at + 1]


@pytest.mark.usefixtures("fresh_state")
def test_one_process_reads_the_epoch_whole(tmp_path: Path) -> None:
    """One process reads the whole epoch, or what is left after the batches that the script skips."""
    check_epochs(tmp_path)


@world(2)
def test_ranks_read_the_epoch_whole(tmp_path: Path) -> None:
    """Two ranks read their shares of the whole epoch, or what is left after the batches that the script skips."""
    check_epochs(tmp_path)


@pytest.mark.usefixtures("fresh_state")
def test_an_order_drawn_from_the_process_is_that_of_plain_torch(tmp_path: Path) -> None:
    """Without a seeded sampler, the epoch after a load is the one that torch draws from the saved generator."""
    options = {"shuffle": True}
    interrupted(tmp_path / "state", 1, 4, **options)
    set_seed(SEED)
    torch.nn.Linear(1, 1)
    plain = DataLoader(range(LENGTH), batch_size=SIZE, shuffle=True)
    assert len(list(plain)) + len(list(islice(plain, 4))) == len(plain) + 4
    expected = values(plain)
    accelerator, loader = prepared(**options)
    accelerator.load_state(str(tmp_path / "state"))
    assert values(loader) == expected


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({"restore_position": True}, None),
        ({"restore_position": True}, "0"),
        ({}, "1"),
        pytest.param({"use_stateful_dataloader": True}, None, marks=requires("torchdata")),
    ],
)
def test_an_exact_resume_is_one_word_away(
    options: dict[str, bool], variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the argument, the variable or a stateful loader, the first pass gives the rest of the epoch."""
    if variable is not None:
        monkeypatch.setenv("ACCEL_RESTORE_POSITION", variable)
    interrupted(tmp_path / "state", 1, 3, **options)
    accelerator, loader = prepared(**options)
    accelerator.load_state(str(tmp_path / "state"))
    whole = share(list(range(LENGTH)), 0, 1)
    assert values(loader) == whole[3:]
    assert values(loader) == whole


@pytest.mark.usefixtures("fresh_state")
def test_a_script_that_imports_accel_resumes_exactly(tmp_path: Path) -> None:
    """Where a script uses accel, a library that imports the drop-in does not change how it resumes."""
    importlib.import_module("accel")
    interrupted(tmp_path / "state", 0, 3)
    accelerator, loader = prepared()
    accelerator.load_state(str(tmp_path / "state"))
    assert values(loader) == share(list(range(LENGTH)), 0, 1)[3:]


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("saved_exactly", [False, True])
def test_a_checkpoint_serves_both_ways_of_resuming(saved_exactly: bool, tmp_path: Path) -> None:
    """Whichever way it was saved, it is loaded in the other one."""
    interrupted(tmp_path / "state", 0, 3, restore_position=saved_exactly)
    accelerator, loader = prepared(restore_position=not saved_exactly)
    accelerator.load_state(str(tmp_path / "state"))
    assert values(loader) == share(list(range(LENGTH)), 0, 1)[0 if saved_exactly else 3 :]
