"""Streams that differ between ranks end together; what fails on one rank is known to all."""

import itertools
import warnings
from collections.abc import Mapping

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_core.comm.objects import gather_object
from accel_core.data.metrics import gather_for_metrics
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.presharded import already_sharded
from accel_core.data.skip import skip_first_batches
from accel_core.errors import CollectiveError, DataError, DoubleShardingError, RemoteRankError
from accel_core.process.world import ensure
from accel_core.state.gradient import GradientState
from accel_testing import requires, world

LENGTHS = (5, 8, 0, 3)


class Broken(Stream):
    """A stream of which one sample cannot be read."""

    def __iter__(self):
        for value in super().__iter__():
            if value == 6:
                raise DataError("sample 6 is broken")
            yield value


def own_stream(**kwargs):
    """Prepare this rank's own stream: rank r counts from 100 * r."""
    rank = ensure().rank
    loader = DataLoader(Stream(LENGTHS[rank], 100 * rank), batch_size=2)
    return prepare_data_loader(already_sharded(loader), **kwargs)


def read(loader):
    """Return this rank's batches, what is gathered, and the ends."""
    state, batches, gathered, ends = GradientState(), [], [], []
    for batch in loader:
        batches.append(batch.tolist())
        gathered += gather_for_metrics(batch, state).tolist()
        ends.append(state.end_of_dataloader)
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
    return batches, gathered


@pytest.mark.parametrize("end", ["drop", "repeat", "empty"])
@world(4)
def test_own_streams_of_different_lengths_end_together(end):
    """All end with the shortest, here before a batch, or run on: repeating what is not gathered, or without rows."""
    batches, gathered = read(own_stream(uneven_end=end))
    every = [100 * rank + value for rank, length in enumerate(LENGTHS) for value in range(length)]
    assert sorted(gathered) == ([] if end == "drop" else every)
    if end == "empty":
        length = LENGTHS[ensure().rank]
        assert [len(batch) for batch in batches] == [max(0, min(2, length - 2 * step)) for step in range(4)]
    else:
        assert len(batches) == (0 if end == "drop" else 4)
        assert all(batches), "a rank that never had anything borrows"


@world(2)
def test_the_shortest_of_own_streams_ends_all_by_default():
    """What the longer stream still holds is left out, with a warning."""
    batches, gathered = read(own_stream())
    assert batches == [[[0, 1], [2, 3], [4]], [[100, 101], [102, 103], [104, 105]]][ensure().rank]
    assert gathered == [0, 1, 100, 101, 2, 3, 102, 103, 4, 104, 105]


@pytest.mark.parametrize("uneven_end", ["drop", "repeat", "empty"])
@world(4)
def test_undeclared_streams_of_different_lengths_end(uneven_end):
    """Streams that should be the same on all ranks and are not end together too."""
    rank = ensure().rank
    loader = prepare_data_loader(DataLoader(Stream((5, 30, 0, 17)[rank]), batch_size=2), uneven_end=uneven_end)
    steps = sum(1 for _ in loader)
    assert steps == (0 if uneven_end == "drop" else 4)


@pytest.mark.parametrize("dispatch", [False, True])
@world(3)
def test_a_rank_that_fails_stops_all(dispatch):
    """A rank whose data cannot be read raises its own error, and the others learn of it instead of waiting."""
    rank = ensure().rank
    data = (Stream if rank else Broken)(20)
    loader = prepare_data_loader(DataLoader(data, batch_size=1), dispatch_batches=dispatch)
    seen = []
    with pytest.raises(DataError if rank == 0 else RemoteRankError) as caught:
        seen.extend(batch.tolist() for batch in loader)
    assert ("sample 6 is broken" in str(caught.value)) == (rank == 0 or dispatch)
    assert not GradientState().in_dataloader
    assert len(seen) < 7


class Sealed(Mapping):
    """A mapping that cannot be made anew from items."""

    def __init__(self):
        self.items_ = {"value": torch.ones(2)}

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


@world(2)
def test_a_batch_whose_rows_cannot_be_counted_stops_all():
    """A rank that cannot tell how many samples its batch holds raises its own error, and the other learns of it."""
    rank = ensure().rank
    batches = DataLoader([Sealed()] if rank else [torch.ones(2)], batch_size=None, collate_fn=lambda batch: batch)
    with pytest.raises(TypeError if rank else RemoteRankError):
        list(prepare_data_loader(already_sharded(batches)))


@world(3)
def test_a_batch_that_cannot_be_sent_stops_all():
    """Where rank 0 reads what cannot be pickled, every rank gets an error that says so, and the next epoch is read."""
    rank = ensure().rank
    batches = [torch.ones(2), torch.ones(2), torch.ones(2), [lambda: None]]
    loader = prepare_data_loader(DataLoader(batches, batch_size=None), dispatch_batches=True)
    for _ in range(2):
        with pytest.raises(RemoteRankError if rank else CollectiveError, match="pickl"):
            list(loader)
        assert not GradientState().in_dataloader
    assert len(list(prepare_data_loader(DataLoader(batches[:3], batch_size=None), dispatch_batches=True))) == 1


@world(3)
def test_distributed_sampler_kept():
    """With torch's DistributedSampler kept, every sample is gathered once although it repeats some."""
    here = ensure()
    loader = DataLoader(range(11), batch_size=2, sampler=DistributedSampler(range(11), shuffle=True, seed=5))
    with pytest.raises(DoubleShardingError):
        prepare_data_loader(loader)
    _, gathered = read(prepare_data_loader(loader, sharding="local"))
    assert sorted(gathered) == list(range(11))
    assert loader.sampler.num_replicas == here.size


@pytest.mark.parametrize("seedable", [False, True])
@world(2)
def test_same_order_on_all_ranks(seedable):
    """Ranks with different seeds draw one order, epoch after epoch, when they synchronize their generators."""
    torch.manual_seed(ensure().rank)
    loader = prepare_data_loader(
        DataLoader(range(12), batch_size=2, shuffle=True), rng_types=["generator"], use_seedable_sampler=seedable
    )
    orders = [read(loader)[1] for _ in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@world(2)
def test_dispatch_slice_function():
    """A user's function takes each rank's part out of the global batch."""
    calls = []

    def every_second(batch, part, process_index=None, num_processes=None):
        calls.append((part, process_index, num_processes))
        return batch[process_index::num_processes]

    loader = prepare_data_loader(
        DataLoader(Stream(8), batch_size=2), dispatch_batches=True, slice_fn_for_dispatch=every_second
    )
    rank = ensure().rank
    assert [batch.tolist() for batch in loader] == [[0 + rank, 2 + rank], [4 + rank, 6 + rank]]
    assert calls[0] == (slice(2 * rank, 2 * rank + 2), rank, 2)


@world(2)
def test_dispatch_reads_on_the_main_rank_alone():
    """Only rank 0 reads; batches of any size reach the others, also larger ones than before."""
    rank = ensure().rank
    data = [torch.ones(size) for size in (3, 70000, 5, 0, 9)] if rank == 0 else [0] * 5
    loader = prepare_data_loader(DataLoader(data, batch_size=None), dispatch_batches=True)
    found = [(batch.numel(), float(batch.sum())) for batch in loader]
    assert found == [[(3, 3.0), (5, 5.0), (9, 9.0)], [(70000, 70000.0), (0, 0.0), (3, 3.0)]][rank]


@pytest.mark.parametrize("kind", ["map", "stream"])
@world(2)
def test_dispatch_skips_and_goes_on(kind):
    """A dispatching loader skips batches, takes up a position and counts it alike on every rank."""
    rank, state = ensure().rank, GradientState()

    def make():
        data = Stream(11) if kind == "stream" else range(11)
        return prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=True)

    def epoch(loader):
        return [gather_for_metrics(batch, state).tolist() for batch in loader]

    whole = epoch(make())
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert epoch(skip_first_batches(make(), 1)) == whole[1:]
    for stop in range(1, len(whole) + 1):
        loader = make()
        for step, _ in enumerate(loader, 1):
            position = loader.cursor.state_dict()
            if step == stop:
                break
        ended = stop == len(whole)
        assert (position["epoch"], position["offset"]) == ((1, 0) if ended else (0, 4 * stop))
        resumed = make()
        resumed.cursor.load_state_dict(position)
        assert epoch(resumed) == (whole if ended else whole[stop:])
        assert epoch(resumed) == whole
    assert next(iter(make())).tolist() == [[0, 1], [2, 3]][rank]


@requires("torchdata")
@pytest.mark.parametrize("kind", ["map", "stream"])
@world(2)
def test_dispatch_on_a_stateful_loader(kind):
    """The reading rank's state brings back what follows any batch, on all ranks; the others have no state."""

    def make():
        data = Stream(11) if kind == "stream" else range(11)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return prepare_data_loader(
                DataLoader(data, batch_size=2), dispatch_batches=True, use_stateful_dataloader=True
            )

    whole = [batch.tolist() for batch in make()]
    for stop in (1, 2):
        loader = make()
        for step, _ in enumerate(loader, 1):
            if step == stop:
                state = loader.state_dict()
                break
        assert bool(state) == (ensure().rank == 0)
        resumed = make()
        resumed.load_state_dict(state)
        found = [batch.tolist() for batch in resumed]
        assert found[:-1] == whole[stop:-1]
        assert len(found) == len(whole) - stop


@world(2)
def test_dispatch_of_a_mixed_batch():
    """Whatever a batch is made of arrives as it was, tensors of any dtype included."""
    batches = [
        {"a": torch.arange(4).to(torch.bfloat16), "b": list(letters), "c": (torch.full((4, 2), flag), 7)}
        for letters, flag in (("xyzw", True), ("pqrs", False))
    ]
    loader = prepare_data_loader(
        DataLoader(batches, batch_size=None), dispatch_batches=True, put_on_device=True, device=torch.device("cpu")
    )
    rank = ensure().rank
    (found,) = list(loader)
    assert found["b"] == batches[rank]["b"]
    assert torch.equal(found["a"], batches[rank]["a"])
    assert torch.equal(found["c"][0], batches[rank]["c"][0])
    assert found["c"][1] == 7


class Pairs(IterableDataset):
    """The first numbers, each with its square: torch collates them to a list of two columns."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([(torch.ones(2) * number, number**2) for number in range(self.length)])


@world(2)
def test_short_batches_of_columns_keep_their_rows():
    """Of batches of two columns, every sample is gathered once, however many the last ones hold."""
    for length, dispatch in itertools.product((1, 2, 3, 9, 10, 17), (True, False)):
        loader = prepare_data_loader(DataLoader(Pairs(length), batch_size=4), dispatch_batches=dispatch)
        seen = [gather_for_metrics((values, squares, -squares), GradientState()) for values, squares in loader]
        assert all(len(step) == 3 for step in seen)
        assert sorted(torch.cat([squares for _, squares, _ in seen]).tolist()) == [n**2 for n in range(length)]


class Sharded(IterableDataset):
    """Numbers in shards, as streams of `datasets` hold them; it notes the shards that are read."""

    def __init__(self, shards, read):
        self.shards, self.read = shards, read

    @property
    def num_shards(self):
        """Number of shards."""
        return len(self.shards)

    def shard(self, num_shards, index):
        """Return a part of the shards."""
        return Sharded(self.shards[index::num_shards], self.read)

    def __iter__(self):
        for shard in self.shards:
            self.read.append(shard[0])
            yield from shard


@world(2)
def test_each_rank_reads_its_own_shards():
    """Of shards that can be dealt out evenly each rank reads its own alone; every sample is gathered once."""
    rank = ensure().rank
    for count in (1, 2, 3, 4):
        shards = [list(range(10 * number, 10 * number + 3)) for number in range(count)]
        for options in ({}, {"split_batches": True}, {"uneven_end": "empty"}):
            seen = []
            plain = DataLoader(Sharded(shards, seen), batch_size=2)
            loader = prepare_data_loader(plain, dispatch_batches=False, **options)
            own = count % 2 == 0 and "split_batches" not in options
            for _ in range(2):
                assert sorted(read(loader)[1]) == list(itertools.chain(*shards))
            assert seen == [shard[0] for shard in (shards[rank::2] if own else shards)] * 2
            assert type(plain.dataset) is Sharded
            assert plain.dataset.num_shards == count


@requires("datasets")
@world(2)
def test_rows_of_datasets_come_once_where_rounds_are_even():
    """24 rows of a stream of `datasets` are six rounds of two batches, however many shards it has."""
    from datasets import Dataset

    rows = Dataset.from_dict({"value": list(range(24))})
    for shards in (1, 2, 3, 4):
        stream = rows.to_iterable_dataset(num_shards=shards).with_format("torch")
        loader = prepare_data_loader(DataLoader(stream, batch_size=2), dispatch_batches=False)
        rounds = gather_object([[batch["value"].tolist() for batch in loader]])
        assert [len(part) for part in rounds] == [6, 6]
        assert sorted(itertools.chain(*itertools.chain(*rounds))) == list(range(24))


@requires("datasets")
@world(2)
def test_streams_of_datasets_are_read_by_their_shards():
    """Each rank maps the samples of its own shards of a stream of `datasets`; epochs reach what it reads."""
    from datasets import IterableDataset as HubStream

    mapped = []

    def numbers(shards):
        for shard in shards:
            yield from ({"value": 10 * shard + place} for place in range(4))

    def double(sample):
        mapped.append(sample["value"])
        return {"value": 2 * sample["value"]}

    stream = HubStream.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]}).map(double)
    loader = prepare_data_loader(DataLoader(stream, batch_size=2), dispatch_batches=False)
    gathered = [gather_for_metrics(batch["value"], GradientState()).tolist() for batch in loader]
    mine = {20, 30} if ensure().rank else {0, 10}
    assert sorted(mapped) == sorted(first + place for first in mine for place in range(4))
    assert sorted(itertools.chain(*gathered)) == sorted(
        2 * (first + place) for first in (0, 10, 20, 30) for place in range(4)
    )
    next(iter(loader))
    assert loader.dataset.epoch == 1
