"""Every sample once: what real ranks gather from prepared loaders is the dataset."""

import itertools

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader

from accel_core.data.metrics import gather_for_metrics
from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import RankDisagreementError
from accel_core.process.world import ensure
from accel_core.state.gradient import GradientState
from accel_testing import world
from accel_testing.world import run

LENGTHS, BATCHES = (1, 2, 3, 5, 8, 12, 13, 17), (1, 2, 3, 4)


def gathered_epoch(loader, wanted=lambda batch: batch):
    """Gather all batches of an epoch, and check that the end is told with the last one alone."""
    state, found, ends = GradientState(), [], []
    for batch in loader:
        ends.append(state.end_of_dataloader)
        found.append(gather_for_metrics(wanted(batch), state))
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends), ends
    assert not state.in_dataloader
    return found


def matrix(ranks, drop_last):
    """Lengths, batch sizes and ways to cut, with what has to come out."""
    for length, size, split in itertools.product(LENGTHS, BATCHES, (False, True)):
        if split and size % ranks:
            continue
        whole = size if split else size * ranks
        yield length, size, split, list(range(length // whole * whole if drop_last else length))


def check_matrix(kind, dispatch, even, drop_last):
    """Go through the matrix on this test's ranks."""
    here = ensure()
    for length, size, split, expected in matrix(here.size, drop_last):
        data = Stream(length) if kind == "iterable" else range(length)
        loader = prepare_data_loader(
            DataLoader(data, batch_size=size, drop_last=drop_last),
            split_batches=split,
            dispatch_batches=dispatch,
            even_batches=even,
        )
        found = [value for part in gathered_epoch(loader) for value in part.tolist()]
        if even or here.is_main:
            assert found == expected, (length, size, split, found)
        else:
            assert found == expected[: len(found)]


CASES = [
    ("map", False, True),
    ("map", False, False),
    ("map", True, True),
    ("iterable", False, True),
    ("iterable", True, True),
]


@pytest.mark.parametrize(("ranks", "drop_last"), [(2, False), (2, True), (3, False), (4, False)])
@pytest.mark.parametrize(("kind", "dispatch", "even"), CASES)
def test_ranks_gather_the_dataset(ranks, drop_last, kind, dispatch, even):
    """Two ranks and more gather the dataset exactly, in order."""
    run(check_matrix, ranks, (kind, dispatch, even, drop_last))


@world(2)
def test_several_rows_a_sample():
    """Results with several rows a sample lose exactly the rows of repeats, and scalars those of ranks with repeats."""
    state = GradientState()
    loader = prepare_data_loader(DataLoader(range(5), batch_size=2))
    rows, scalars = [], []
    for batch in loader:
        rows += gather_for_metrics(batch.repeat_interleave(3), state).tolist()
        scalars += gather_for_metrics(batch.sum(), state).tolist()
    assert rows == [value for value in range(5) for _ in range(3)]
    assert scalars == [0 + 1, 2 + 3, 4 + 0]


@world(2)
def test_gather_object_option():
    """With use_gather_object, lists of any lengths are joined and repeats are dropped."""
    state = GradientState()
    loader = prepare_data_loader(DataLoader(range(5), batch_size=2))
    found = []
    for batch in loader:
        found += gather_for_metrics([f"{value}" for value in batch.tolist()], state, use_gather_object=True)
    assert found == ["0", "1", "2", "3", "4"]
    rows = [row for batch in loader for row in gather_for_metrics(batch, state, use_gather_object=True)]
    assert [row.item() for row in rows] == [0, 1, 2, 3, 4]


@world(2)
def test_without_batching():
    """With batch_size=None single samples go round the ranks."""
    state = GradientState()
    loader = prepare_data_loader(DataLoader(torch.arange(5), batch_size=None))
    assert len(loader) == 3
    assert [value for sample in loader for value in gather_for_metrics(sample, state).tolist()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dispatch", [{}, {"dispatch_batches": True, "split_batches": True}])
@world(2)
def test_numpy_arrays(dispatch):
    """Batches and results of numpy arrays are cut and joined by rows, and repeats are dropped."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    state = GradientState()

    def collate(values):
        return [np.array(values), np.array(values)[:, None] * 10]

    loader = prepare_data_loader(DataLoader(range(11), batch_size=4, collate_fn=collate), **dispatch)
    gathered = [gather_for_metrics({"one": one, "ten": ten}, state) for one, ten in loader]
    assert np.concatenate([part["one"] for part in gathered]).tolist() == list(range(11))
    assert np.concatenate([part["ten"] for part in gathered]).tolist() == [[value * 10] for value in range(11)]
    objects = gather_for_metrics(np.arange(2), GradientState(), use_gather_object=True)
    assert [int(value) for value in objects] == [0, 1, 0, 1]
    assert type(objects) is list


@pytest.mark.parametrize(("kind", "dispatch"), [("map", None), ("stream", None), ("map", True), ("stream", True)])
@world(2)
def test_workers(kind, dispatch):
    """Worker processes, of each rank or of the one that reads for all, change nothing of what is gathered."""
    data = Stream(11) if kind == "stream" else range(11)
    given = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    loader = prepare_data_loader(given, dispatch_batches=dispatch)
    assert [value for part in gathered_epoch(loader) for value in part.tolist()] == list(range(11))


@pytest.mark.parametrize("length", [5, 16, 23])
@world(2)
def test_streams_parted_by_worker(length):
    """Workers that read parts of a stream end at different steps, and every sample is still gathered once."""
    loader = prepare_data_loader(
        DataLoader(Stream(length, parted=True), batch_size=2, num_workers=2, multiprocessing_context="fork"),
        dispatch_batches=False,
    )
    for _ in range(2):
        found = [value for part in gathered_epoch(loader) for value in part.tolist()]
        assert sorted(found) == list(range(length))


@world(2)
def test_different_structures_are_refused():
    """Ragged sizes are gathered; different dtypes or structures are an error on every rank, and nobody waits."""
    rank, state = ensure().rank, GradientState()
    ragged = gather_for_metrics(torch.full((2, 2 + rank), float(rank)), state)
    assert [tuple(row.shape) for row in ragged] == [(2,), (2,), (3,), (3,)]
    with pytest.raises(RankDisagreementError, match=r"(?s)int64.*float32"):
        gather_for_metrics(torch.ones(2, dtype=torch.float32 if rank else torch.int64), state)
    with pytest.raises(RankDisagreementError, match="Ranks called gather with different data"):
        gather_for_metrics({"a": torch.ones(2)} if rank else {"b": torch.ones(2)}, state)
