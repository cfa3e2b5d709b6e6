"""Gathering for metrics in one process: the last, shorter batch counts its own samples."""

from typing import Any

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.plugins.loading import DataLoaderConfiguration


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [None, False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("samples", [1, 7, 8, 66])
@pytest.mark.parametrize("streams", [False, True])
def test_a_loss_repeated_for_a_full_batch_has_a_row_a_sample(
    fresh_state: None, streams: bool, samples: int, workers: int, dispatch: bool | None
) -> None:
    """A value repeated once a place keeps one row a sample, of the last batch and of short batches inside a stream."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    data: Any = Stream(samples, parted=True) if streams else range(samples)
    loader = accelerator.prepare(DataLoader(data, batch_size=8, **kwargs))  # type: ignore[arg-type]
    kept = [(len(batch), len(accelerator.gather_for_metrics(torch.tensor(0.5).repeat(8)))) for batch in loader]
    assert [rows for rows, _ in kept] == [rows for _, rows in kept]
    assert sum(rows for rows, _ in kept) == samples


@pytest.mark.parametrize("dispatch", [None, False, True])
@pytest.mark.parametrize("data", [list(range(3)), Stream(3, parted=True)], ids=["map", "stream"])
def test_the_batch_after_the_loop_counts_its_own_samples(
    fresh_state: None, data: object, dispatch: bool | None
) -> None:
    """After next(iter(loader)) and after a break at the end, the last batch is still known to be the last."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
    )
    loader = accelerator.prepare(DataLoader(data, batch_size=5))  # type: ignore[arg-type]
    assert next(iter(loader)).tolist() == [0, 1, 2]
    assert len(accelerator.gather_for_metrics(torch.tensor(0.5).repeat(5))) == 3
    with accelerator.accumulate():
        assert accelerator.sync_gradients
    for _ in loader:
        break
    assert len(accelerator.gather_for_metrics(torch.tensor(0.5).repeat(5))) == 3


def test_a_broken_off_evaluation_keeps_the_training_epoch(fresh_state: None) -> None:
    """What is known of a loader broken off is forgotten with the next batch of the loader that is trained with."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train = accelerator.prepare(DataLoader(list(range(6)), batch_size=1))  # type: ignore[arg-type]
    evaluation = accelerator.prepare(DataLoader(list(range(2)), batch_size=2))  # type: ignore[arg-type]
    synced = []
    for _ in train:
        assert accelerator.gradient_state.active_dataloader is train
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
        for _ in evaluation:
            break
        assert accelerator.gradient_state.active_dataloader is evaluation
    assert synced == [False, True] * 3
    for _ in train:
        with accelerator.accumulate():
            assert not accelerator.sync_gradients
        break
    for _ in evaluation:
        with accelerator.accumulate():
            assert accelerator.sync_gradients, "its one batch ends it, whatever is left of the other"
