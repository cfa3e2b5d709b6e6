"""Loaders that keep a state of their own, in a checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_core.checkpoint import folder
from accel_core.checkpoint.run import BareRun
from accel_core.data.prepare import prepare_data_loader
from accel_core.testing import requires


class Stream(IterableDataset[int]):
    """Numbers in a row."""

    def __iter__(self) -> Iterator[int]:
        yield from range(11)


def build(streams: bool) -> BareRun:
    """Return a run with one loader of torchdata's."""
    loader = DataLoader(Stream() if streams else range(11), batch_size=2, shuffle=None if streams else True)
    return BareRun(
        dataloaders=[prepare_data_loader(loader, num_processes=1, process_index=0, use_stateful_dataloader=True)]
    )


@requires("torchdata")
@pytest.mark.usefixtures("fresh_state")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("streams", [False, True])
def test_a_stateful_loader_goes_on_where_it_was_saved(streams: bool, tmp_path: Path) -> None:
    """Its state is a file of its own, and brings back the rest of the epoch and the epochs after it."""
    run = build(streams)
    (loader,) = run.dataloaders
    batches = iter(loader)
    next(batches), next(batches)
    folder.save_state(run, tmp_path / "ckpt")
    rest = [batch.tolist() for batch in batches]
    again = [batch.tolist() for batch in loader]
    assert "dl_state_dict.bin" in os.listdir(tmp_path / "ckpt")
    resumed = build(streams)
    folder.load_state(resumed, tmp_path / "ckpt")
    assert [batch.tolist() for batch in resumed.dataloaders[0]] == rest
    assert [batch.tolist() for batch in resumed.dataloaders[0]] == again
