"""Batches of any sizes and shapes on real ranks: every sample once, one structure, and nobody waits for ever."""

import pytest
import torch
from streams import Stream
from torch.utils.data import BatchSampler, DataLoader

from accel_core.accelerator import Accelerator
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_testing import world


class Buckets(BatchSampler):
    """Batches whose sizes differ, although there is a batch size."""

    def __init__(self, lengths, size):
        self.lengths, self.batch_size, self.drop_last = lengths, size, False
        self.sampler = range(sum(lengths))

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        first = 0
        for length in self.lengths:
            yield list(range(first, first + length))
            first += length


def start(**options):
    """Return an accelerator whose loaders are set up as told."""
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def gathered(accelerator, loader, wanted=lambda batch: batch):
    """Return what an epoch gives for metrics, step by step."""
    return [accelerator.gather_for_metrics(wanted(batch)) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", ["own", "torch", "unbatched"])
@pytest.mark.parametrize("length", [5, 7, 9])
@world(2)
def test_ranks_without_a_last_batch_end_at_once(length, sampler, workers):
    """With even_batches=False and any sampler, results are gathered by those that have a batch, and nobody waits."""
    accelerator = start(even_batches=False)
    size = None if sampler == "unbatched" else 2
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    kwargs |= {} if sampler == "torch" else {"sampler": range(length)}
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=size, **kwargs))
    found = [value for part in gathered(accelerator, loader) for value in part.tolist()]
    assert found == list(range(length))[: len(found)]
    if accelerator.is_main_process:
        assert found == list(range(length))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("lengths", "split"),
    [([3, 1, 1], True), ([3, 1, 4, 2, 4, 1], True), ([4, 1, 4, 3], False), ([2, 2, 5], False), ([2, 2, 2, 5], False)],
)
@world(2)
def test_batches_of_any_size_are_gathered_once(lengths, split, even):
    """Batches that are short inside the epoch, or longer at its end, are gathered in order, each sample once."""
    accelerator = start(even_batches=even, split_batches=split)
    batches = Buckets(lengths, 4 if split else max(lengths[:-1]))
    loader = accelerator.prepare(DataLoader(range(sum(lengths)), batch_sampler=batches))
    found = [value for part in gathered(accelerator, loader) for value in torch.as_tensor(part).tolist()]
    if even or accelerator.is_main_process:
        assert found == list(range(sum(lengths)))


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("length", [6, 7, 9])
@world(2)
def test_one_tensor_a_sample_stays_one_a_sample(length, even, equal):
    """A list with one tensor a sample is as long as the data, whether ranks hold the same shapes or not."""

    def boxes(indices):
        return [torch.full((5 if equal else index % 4 + 4, 4), float(index)) for index in indices]

    accelerator = start(even_batches=even)
    loader = accelerator.prepare(DataLoader(range(length), batch_size=3, collate_fn=boxes))
    found = [box for part in gathered(accelerator, loader) for box in part]
    assert [int(box[0, 0]) for box in found] == list(range(length))[: len(found)]
    assert all(isinstance(box, torch.Tensor) and box.shape[1] == 4 for box in found)
    if even or accelerator.is_main_process:
        assert len(found) == length
    nested = gathered(accelerator, loader, lambda batch: {"boxes": batch, "count": torch.tensor([float(len(batch))])})
    assert sum(len(part["boxes"]) for part in nested) == len(found)


@world(2)
def test_nested_columns_of_varying_batches_keep_their_structure():
    """Columns made of mappings and tuples come back as such at every step, whatever the batches' sizes."""

    def columns(indices):
        rows = torch.tensor(indices)
        return [{"a": rows, "name": [f"n{index}" for index in indices]}, (rows * 2, [str(index) for index in indices])]

    accelerator = start()
    lengths = [3, 1, 3, 2, 3]
    loader = accelerator.prepare(DataLoader(range(12), batch_sampler=Buckets(lengths, 3), collate_fn=columns))
    parts = gathered(accelerator, loader)
    assert [(type(part), type(part[0]), type(part[1]), len(part)) for part in parts] == [(list, dict, tuple, 2)] * 3
    assert [value for part in parts for value in part[0]["a"].tolist()] == list(range(12))
    assert [name for part in parts for name in part[1][1]] == [str(index) for index in range(12)]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
@world(2)
def test_the_batch_after_the_loop_counts_its_own_samples(kind, dispatch):
    """After next(iter(loader)) or a break at the last batch, results are gathered as they are inside the loop."""
    accelerator = start(dispatch_batches=dispatch)
    data = Stream(9) if kind == "stream" else range(9)
    loader = accelerator.prepare(DataLoader(data, batch_size=5))
    batch = next(iter(loader))
    assert accelerator.gather_for_metrics(batch).tolist() == list(range(9))
    with accelerator.accumulate():
        assert accelerator.sync_gradients
    longer = accelerator.prepare(DataLoader(Stream(13) if kind == "stream" else range(13), batch_size=2))
    for last in longer:  # noqa: B007
        if accelerator.gradient_state.end_of_dataloader:
            break
    assert accelerator.gather_for_metrics(last).tolist() == [12]
