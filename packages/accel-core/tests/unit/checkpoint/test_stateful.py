"""Loaders that keep a state of their own, in a checkpoint."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from streams import Stream
from torch import nn
from torch.utils.data import DataLoader

from accel_core.checkpoint import names, pickles
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import CheckpointMismatchError
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_testing import requires

pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def build(streams: bool) -> BareRun:
    """Return a run with one loader of torchdata's."""
    loader = DataLoader(Stream(11) if streams else range(11), batch_size=2, shuffle=None if streams else True)
    return BareRun(
        dataloaders=[prepare_data_loader(loader, num_processes=1, process_index=0, use_stateful_dataloader=True)]
    )


def test_a_position_is_always_saved_and_restored_on_request(tmp_path: Path) -> None:
    """Saved by a run that restores none, it serves one that does; the other's loader stands where it did."""
    runs = [
        BareRun(
            [nn.Linear(1, 1)],
            dataloaders=[prepare_data_loader(DataLoader(range(11), batch_size=2), num_processes=1, process_index=0)],
            data=DataLoaderConfiguration(restore_position=restores),
        )
        for restores in (False, False, True)
    ]
    whole = [batch.tolist() for batch in runs[0].dataloaders[0]]
    batches = iter(runs[0].dataloaders[0])
    next(batches), next(batches)
    save_state(runs[0], tmp_path / "ckpt")
    for run, restored, expected in zip(runs[1:], (False, True), (whole, whole[2:]), strict=True):
        report = load_state(run, tmp_path / "ckpt")
        assert ("data position 0" in report.restored) is restored
        assert run.dataloaders[0].iteration == int(restored)
        assert [batch.tolist() for batch in run.dataloaders[0]] == expected
        assert [batch.tolist() for batch in run.dataloaders[0]] == whole


@requires("torchdata")
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
def test_a_save_straight_after_a_load_is_the_same_position(streams: bool, epochs: int, tmp_path: Path) -> None:
    """A loader's state is a file of its own: who loads and saves before it reads anything passes it on, and goes on."""
    run = build(streams)
    (loader,) = run.dataloaders
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    next(batches), next(batches)
    save_state(run, tmp_path / "first")
    assert (tmp_path / "first" / "dl_state_dict.bin").exists()
    rest = [batch.tolist() for batch in batches]
    following = [batch.tolist() for batch in loader]
    between = build(streams)
    load_state(between, tmp_path / "first")
    save_state(between, tmp_path / "second")
    last = build(streams)
    load_state(last, tmp_path / "second")
    assert [batch.tolist() for batch in last.dataloaders[0]] == rest
    assert [batch.tolist() for batch in last.dataloaders[0]] == following
    assert [batch.tolist() for batch in between.dataloaders[0]] == rest


@requires("torchdata")
@pytest.mark.parametrize("streams", [False, True])
def test_a_save_at_the_end_of_an_epoch_changes_no_draw(streams: bool, tmp_path: Path) -> None:
    """The next epochs, and what is drawn after them, are those of the run that went on."""

    def go_on(run: BareRun) -> tuple[list[list[int]], float]:
        return [batch.tolist() for _ in range(2) for batch in run.dataloaders[0]], torch.rand(1).item()

    torch.manual_seed(1)
    run = build(streams)
    assert len(list(run.dataloaders[0])) == 6
    save_state(run, tmp_path / "ckpt")
    expected = go_on(run)
    torch.manual_seed(2)
    resumed = build(streams)
    load_state(resumed, tmp_path / "ckpt")
    assert go_on(resumed) == expected


@requires("torchdata")
def test_saving_an_unused_loader_draws_nothing(tmp_path: Path) -> None:
    """A run that saves draws what one that does not save draws, then and afterwards, and a resumed run goes on so."""

    def two_loaders(seed: int) -> BareRun:
        torch.manual_seed(seed)
        run = build(False)
        run.dataloaders += build(False).dataloaders
        return run

    def begin() -> tuple[BareRun, Iterator[torch.Tensor]]:
        run = two_loaders(3)
        batches = iter(run.dataloaders[0])
        next(batches), next(batches)
        return run, batches

    def finish(run: BareRun, rest: Iterable[torch.Tensor]) -> list[float]:
        passes = (run.dataloaders[1], rest, run.dataloaders[1])
        return [float(batch.sum() + torch.rand(1)) for batches in passes for batch in batches]

    expected = finish(*begin())
    run, rest = begin()
    before = torch.get_rng_state()
    save_state(run, tmp_path / "ckpt")
    assert torch.equal(torch.get_rng_state(), before)
    assert finish(run, rest) == expected
    for other in (run, two_loaders(4)):
        load_state(other, tmp_path / "ckpt")
        assert finish(other, other.dataloaders[0]) == expected
    fresh = two_loaders(5)
    load_state(fresh, tmp_path / "ckpt")
    save_state(fresh, tmp_path / "again")
    last = two_loaders(6)
    load_state(last, tmp_path / "again")
    assert finish(last, last.dataloaders[0]) == expected


_POSITION = {
    "version": 1,
    "epoch": 0,
    "offset": 0,
    "unit": "samples",
    "seed": None,
    "order": {},
    "drawn_late": False,
    "steps": 0,
    "readers": [1, 0, 2, 1, 1, 0],
}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (["list"], "the version None"),
        ({"seed": 3}, "the version None"),
        ({**_POSITION, "version": 99}, "the version 99"),
        ({key: value for key, value in _POSITION.items() if key != "unit"}, r"lacks \['unit'\]"),
        ({**_POSITION, "offset": 2, "unit": "batches"}, "counts batches, and the loader counts samples"),
    ],
)
def test_a_position_that_does_not_fit_is_refused_first(state: object, message: str, tmp_path: Path) -> None:
    """A `sampler.bin` of another version or unit, whose checksum is right, is refused and the model stays as it was."""
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2), num_processes=1, process_index=0)
    run = BareRun([nn.Linear(2, 2)], dataloaders=[loader])
    save_state(run, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "sampler.bin").unlink()
    entry = pickles.write_object(tmp_path / "ckpt" / "sampler.bin", state)
    manifest = Manifest.read(tmp_path / "ckpt")
    assert manifest is not None
    entries = tuple(entry if one.name == entry.name else one for one in manifest.entries)
    (tmp_path / "ckpt" / names.MANIFEST_NAME).unlink()
    replace(manifest, entries=entries).write(tmp_path / "ckpt")
    other = BareRun([nn.Linear(2, 2)], dataloaders=[loader])
    before = other.models[0].weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match=message):
        load_state(other, tmp_path / "ckpt")
    assert torch.equal(other.models[0].weight, before)
