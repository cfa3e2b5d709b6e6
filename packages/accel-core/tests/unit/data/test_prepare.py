"""Preparing a loader keeps it what it is."""

import copy
import gc
import itertools
import pickle
import sys
import weakref

import pytest
import torch
from streams import Pythonic, Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.presharded import already_sharded
from accel_core.data.samplers import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler, get_sampler
from accel_core.data.skip import SkipDataLoader, skip_first_batches
from accel_core.errors import ConfigurationError, DoubleShardingError, UnknownBatchSizeError
from accel_core.state.gradient import GradientState
from accel_testing import requires

pytestmark = pytest.mark.usefixtures("fresh_state")


class Noting:
    """Notes the epochs that are set."""

    epochs = ()

    def set_epoch(self, epoch):
        """Note the epoch."""
        self.epochs = (*self.epochs, epoch)


class NotingStream(Noting, Stream):
    """A stream with `set_epoch`."""


class NotingSampler(Noting, Pythonic):
    """A sampler with `set_epoch`."""


class Doubling(DataLoader):
    """A loader class of a user, with a constructor and attributes of its own."""

    def __init__(self, length, *, factor):
        super().__init__(range(length), batch_size=2)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor


def prepare(loader, ranks=2, rank=0, **kwargs):
    """Prepare a loader as one of several ranks."""
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **kwargs)


def values(loader):
    """Return an epoch as lists."""
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_user_class_survives(ranks):
    """Class, attributes and an overridden iteration are kept, and the constructor is not called again."""
    loader = Doubling(7, factor=10)
    loader.note = ["mine"]
    prepared = prepare(loader, ranks)
    assert isinstance(prepared, Doubling)
    assert isinstance(prepared, DataLoaderShard)
    assert prepared.note is loader.note
    assert prepared.factor == 10
    assert values(prepared) == ([[0, 10], [20, 30], [40, 50], [60]] if ranks == 1 else [[0, 10], [40, 50]])
    assert values(loader) == [[0, 10], [20, 30], [40, 50], [60]]
    assert type(prepared.base_dataloader) is Doubling


def test_settings_survive():
    """Workers' settings, generator and collate function are the user's own objects."""
    generator = torch.Generator()
    loader = DataLoader(
        range(8),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        worker_init_fn=print,
        generator=generator,
        persistent_workers=True,
        prefetch_factor=5,
        timeout=3,
        collate_fn=list,
    )
    prepared = prepare(loader)
    for name in ("num_workers", "worker_init_fn", "generator", "persistent_workers", "prefetch_factor", "timeout"):
        assert getattr(prepared, name) is getattr(loader, name)
    assert prepared.collate_fn is list
    assert isinstance(prepared, DataLoader)
    assert prepared.dataset is loader.dataset
    assert get_sampler(prepared).generator is generator


def test_persistent_workers_are_kept():
    """Workers that persist serve several epochs; a prepared loader comes back as it is."""
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    prepared = prepare(DataLoader(range(8), batch_size=2, **options))
    assert prepare(prepared) is prepared
    assert values(prepared) == values(prepared) == [[0, 1], [4, 5]]
    workers = prepared._iterator._workers
    assert values(prepared) == [[0, 1], [4, 5]]
    assert prepared._iterator._workers is workers
    prepared._iterator._shutdown_workers()


@pytest.mark.parametrize("ranks", [1, 2])
def test_seedable_order(ranks):
    """The seedable order depends on the seed and the epoch alone, and is the same for any number of ranks."""
    torch.manual_seed(3)
    loader = prepare(DataLoader(range(8), batch_size=8 // ranks, shuffle=True), ranks, use_seedable_sampler=True)
    assert isinstance(get_sampler(loader), SeedableRandomSampler)
    for epoch in range(3):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        torch.manual_seed(50 + epoch)
        assert values(loader) == [order[: 8 // ranks]]
    loader.set_epoch(1)
    assert values(loader) == [torch.randperm(8, generator=torch.Generator().manual_seed(4)).tolist()[: 8 // ranks]]
    chosen = prepare(DataLoader(range(8), batch_size=8, shuffle=True), 1, use_seedable_sampler=True, data_seed=11)
    assert values(chosen) == [torch.randperm(8, generator=torch.Generator().manual_seed(11)).tolist()]


def test_one_process_reads_as_plain_torch():
    """On one process, order and the default generator are those of the plain loader."""
    torch.manual_seed(1)
    plain = DataLoader(range(9), batch_size=2, shuffle=True)
    expected = values(plain), values(plain), torch.get_rng_state()
    torch.manual_seed(1)
    prepared = prepare(DataLoader(range(9), batch_size=2, shuffle=True), 1)
    found = values(prepared), values(prepared), torch.get_rng_state()
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])


def test_epochs_reach_sampler_and_dataset():
    """Every epoch is told to the sampler or the dataset; a broken-off one is told again."""
    sampler = NotingSampler(range(4))
    loader = prepare(DataLoader(range(4), batch_size=2, sampler=sampler), 1)
    values(loader), values(loader)
    next(iter(loader))
    values(loader)
    assert sampler.epochs == (0, 1, 2, 2)
    stream = NotingStream(4)
    values(prepare(DataLoader(stream, batch_size=2)))
    assert stream.epochs == (0,)


def test_break_keeps_what_is_known_of_the_last_batch():
    """A loader broken off, or let go, is the active one until another batch is given or an iteration begins."""
    state = GradientState()
    loader = prepare(DataLoader(range(8), batch_size=2))
    for _ in loader:
        assert state.active_dataloader is loader
        break
    assert state.active_dataloader is loader
    steps = iter(loader)
    next(steps)
    assert state.dataloader_references == [None, loader]
    inner = prepare(DataLoader(range(4), batch_size=2), 1)
    for _ in inner:
        assert state.active_dataloader is inner
    assert state.active_dataloader is loader
    next(iter(inner))
    assert state.active_dataloader is inner
    next(steps)
    assert state.dataloader_references == [None, loader]
    assert state.end_of_dataloader
    assert list(steps) == []
    assert not state.in_dataloader


def test_a_late_collected_iterator_leaves_the_next_alone():
    """An older iterator that is let go while a newer one is read changes nothing of what is known."""
    state = GradientState()
    loader = prepare(DataLoader(range(12), batch_size=2))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer), next(newer)
    del older
    assert loader.cursor.offset == 8
    next(newer)
    assert state.end_of_dataloader
    assert list(newer) == []
    assert not state.in_dataloader


def test_end_and_remainder():
    """The end is told with the last batch, and the remainder counts its real samples."""
    state = GradientState()
    for loader, remainder in (
        (DataLoader(range(9), batch_size=2), 1),
        (DataLoader(range(8), batch_size=2), 0),
        (DataLoader(range(9), batch_size=2, drop_last=True), -1),
    ):
        prepared = prepare(loader)
        ends = [(state.end_of_dataloader, state.remainder) for _ in prepared]
        assert [end for end, _ in ends] == [False] * (len(prepared) - 1) + [True]
        assert ends[-1][1] == remainder


def test_a_loader_is_released():
    """Nothing keeps a prepared loader alive after it was read."""
    loader = prepare(DataLoader(range(8), batch_size=2))
    values(loader)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_batch_samplers_of_users():
    """A batch sampler of a user's class is sharded as it is, and its own length is not trusted for the end."""

    class Pairs(BatchSampler):
        def __init__(self):
            super().__init__(SequentialSampler(range(6)), 2, False)

        def __len__(self):
            return 99

    loader = prepare(DataLoader(range(6), batch_sampler=Pairs()), 1)
    assert [(batch.tolist(), loader.end_of_dataloader) for batch in loader] == [
        ([0, 1], False),
        ([2, 3], False),
        ([4, 5], True),
    ]
    parts = [values(prepare(DataLoader(range(6), batch_sampler=Pairs()), 2, rank)) for rank in range(2)]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def test_sampler_that_batches():
    """A batch sampler given as sampler, with batch_size=None, is shared out by batches."""
    data = torch.arange(5)
    batches = BatchSampler(SequentialSampler(data), 2, False)
    parts = [values(prepare(DataLoader(data, sampler=batches, batch_size=None), 2, rank)) for rank in range(2)]
    assert parts == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]


def test_sampler_of_a_part():
    """A sampler of a part of the dataset counts for lengths and the remainder."""
    loader = prepare(DataLoader(range(100), batch_size=2, sampler=SubsetRandomSampler([3, 5, 7])))
    assert sorted(value for batch in loader for value in batch.tolist()) != []
    assert (len(loader), loader.total_dataset_length, loader.total_batch_size) == (1, 3, 4)
    assert loader.counts.total == 3


def test_set_sampler():
    """The sampler can be replaced behind the shard."""
    loader = prepare(DataLoader(range(4), batch_size=1))
    loader.set_sampler([3, 2, 1, 0])
    assert values(loader) == [[3], [1]]
    assert loader.get_sampler() == [3, 2, 1, 0]


def test_streams_are_dispatched_where_batches_go_to_the_device():
    """Dispatching is the default there alone, and can be asked for elsewhere."""
    kinds = [type(prepare(DataLoader(Stream(5)), put_on_device=put)).__name__ for put in (False, True)]
    assert kinds == ["DataLoaderShard", "DataLoaderDispatcher"]
    assert isinstance(prepare(DataLoader(range(5)), dispatch_batches=True), DataLoaderDispatcher)


INDIVISIBLE = {
    "map": lambda: DataLoader(range(9), batch_size=3),
    "batch sampler": lambda: DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, False)),
    "stream": lambda: DataLoader(Stream(9), batch_size=3),
}


@pytest.mark.parametrize("kind", INDIVISIBLE)
def test_indivisible_split_is_refused(kind):
    """Batches that cannot be cut in equal parts are refused before anything changes."""
    loader = INDIVISIBLE[kind]()
    before = dict(loader.__dict__)
    with pytest.raises(
        ConfigurationError, match=r"batches of 3 and 2 ranks. Use a batch size of 4, or split_batches=F"
    ):
        prepare(loader, split_batches=True)
    assert loader.__dict__ == before


class Listed:
    """Batches of sizes of their own, from a batch sampler that may name a size."""

    def __init__(self, **named):
        vars(self).update(named)

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([[0, 1], [2, 3, 4, 5]])


@pytest.mark.parametrize("named", [{}, {"batch_size": None}], ids=["missing", "none"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_without_a_fixed_size_are_not_split(named, ranks, dispatch):
    """A batch sampler that names no batch size is refused with `split_batches`, and shared out whole without."""
    loader = DataLoader(range(6), batch_sampler=Listed(**named))
    before = dict(loader.__dict__)
    with pytest.raises(ConfigurationError, match="got batches of any size"):
        prepare(loader, ranks, split_batches=True, dispatch_batches=dispatch)
    with pytest.raises(ConfigurationError, match="got batches of any size"):
        BatchSamplerShard(loader.batch_sampler, ranks, split_batches=True)
    assert loader.__dict__ == before
    assert list(BatchSamplerShard(loader.batch_sampler, ranks)) == list(loader.batch_sampler)[::ranks]


@pytest.mark.parametrize("name", ["sharding", "uneven_end"])
def test_unknown_words_are_refused(name):
    """An unknown way of sharding or ending is refused with those that exist."""
    with pytest.raises(ConfigurationError, match=rf"{name} is not one of its choices; got 'half'\. Use one of \["):
        prepare(DataLoader(range(4)), **{name: "half"})


class Node:
    """What `datasets` attaches to a dataset split by node."""

    rank, world_size = 1, 4


def split_by_node():
    """Return a stream marked as `split_dataset_by_node` marks one."""
    stream = Stream(8)
    stream._distributed = Node()
    return stream


def naming_its_rank():
    """Return a stream that names its rank."""
    stream = Stream(8)
    stream.rank, stream.world_size = 0, 2
    return stream


SHARDED = {
    "DistributedSampler": lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=1)),
    "rank=1, num_replicas=2": lambda: DataLoader(
        range(8), batch_sampler=BatchSampler(DistributedSampler(range(8), num_replicas=2, rank=1), 2, False)
    ),
    "split_dataset_by_node .rank 1 of 4": lambda: DataLoader(split_by_node(), batch_size=2),
    "the dataset Stream .rank=0, world_size=2": lambda: DataLoader(naming_its_rank(), batch_size=2),
    "IterableDatasetShard": lambda: DataLoader(IterableDatasetShard(Stream(8), 2, num_processes=2), batch_size=2),
    "BatchSamplerShard": lambda: DataLoader(
        range(8), batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(range(8)), 2, False), 2, 0)
    ),
}


@pytest.mark.parametrize("found", SHARDED)
def test_double_sharding_is_refused(found):
    """A loader that is split already is recognized; the error offers to remove the split or to keep it, as it is then.

    One process has nothing to split.
    """
    loader = SHARDED[found]()
    before = dict(loader.__dict__)
    with pytest.raises(DoubleShardingError, match=found) as caught:
        prepare(loader)
    assert "remove that split" in str(caught.value)
    assert "already_sharded(loader)" in str(caught.value)
    assert loader.__dict__ == before
    plain = values(SHARDED[found]())
    assert values(prepare(SHARDED[found](), sharding="local")) == plain
    assert values(prepare(already_sharded(SHARDED[found]()))) == plain
    assert values(prepare(SHARDED[found](), 1)) == plain


def test_copies_of_a_declared_loader_are_declared():
    """A copy or a pickle of a loader whose ranks read their own parts is not split again."""
    loader = already_sharded(DataLoader(range(4), batch_size=2))
    for duplicate in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert values(prepare(duplicate)) == [[0, 1], [2, 3]]


def test_a_dataset_that_knows_a_rank_and_is_map_style():
    """A map-style dataset that happens to hold a rank is not taken for a split one."""

    class Data(list):
        rank, world_size = 0, 2

    assert values(prepare(DataLoader(Data(range(4)), batch_size=1))) == [[0], [2]]


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_skip_first_batches(ranks):
    """A skipping loader, of a plain one too, gives the rest of every epoch, knows its length, and has its class."""
    loader = Doubling(9, factor=2) if ranks is None else prepare(Doubling(9, factor=2), ranks)
    whole = values(loader)
    skipping = skip_first_batches(loader, 2)
    assert isinstance(skipping, Doubling)
    assert len(skipping) == len(whole) - 2
    assert values(skipping) == values(skipping) == whole[2:]
    assert values(loader) == whole


def test_skip_of_a_stream():
    """A stream skips as well in every epoch, and a prepared one tells its end."""
    plain = skip_first_batches(DataLoader(Stream(5), batch_size=2), 1)
    assert isinstance(plain, SkipDataLoader)
    assert values(plain) == values(plain) == [[2, 3], [4]]
    loader = skip_first_batches(prepare(DataLoader(Stream(9), batch_size=2)), 1)
    assert [(batch.tolist(), loader.end_of_dataloader) for batch in loader] == [([4, 5], False), ([8, 0], True)]


def test_built_directly():
    """The classes can be built as torch's loader is."""
    loader = DataLoaderShard(range(5), batch_size=2, skip_batches=1)
    assert isinstance(loader, DataLoader)
    assert values(loader) == [[2, 3], [4]]
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (2, 2, 5)
    assert values(DataLoaderDispatcher(range(5), batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert values(SkipDataLoader(Stream(5), skip_batches=2, batch_size=2)) == [[4]]
    skipping = SkipDataLoader(range(9), batch_size=2, skip_batches=2)
    assert values(skipping) == values(skipping) == [[4, 5], [6, 7], [8]]
    assert len(skipping) == 3


def test_batches_without_a_fixed_size_have_none():
    """`hasattr` sees that there is no size, the error says why, and the length of the data is known all the same."""
    loader = prepare(DataLoader(range(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]))
    assert not hasattr(loader, "total_batch_size")
    with pytest.raises(UnknownBatchSizeError, match="got BatchSamplerShard without a batch_size"):
        _ = loader.total_batch_size
    assert loader.total_dataset_length == 6


def test_copies_and_pickles():
    """Prepared loaders can be copied and pickled."""
    for loader in (prepare(DataLoader(range(9), batch_size=2)), prepare(Doubling(9, factor=5))):
        whole = values(loader)
        duplicate, revived = copy.copy(loader), pickle.loads(pickle.dumps(loader))
        assert type(duplicate) is type(revived) is type(loader)
        duplicate.cursor.load_state_dict({**loader.cursor.state_dict(), "offset": 4})
        assert values(loader) == whole
        assert values(duplicate) == whole[1:]
        assert values(revived) == whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch_batches": True},
        {"use_seedable_sampler": True},
        pytest.param({"use_stateful_dataloader": True}, marks=requires("torchdata")),
        pytest.param({"use_stateful_dataloader": True, "dispatch_batches": True}, marks=requires("torchdata")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_pickles_at_any_time(options):
    """Before, inside and after an epoch a loader is pickled with its position; what comes back reads whole epochs."""
    for plain in (DataLoader(range(9), batch_size=2, shuffle=True), Doubling(9, factor=5), DataLoader(Stream(9))):
        loader = prepare(plain, 1, **options)
        samples = sum(map(len, loader))
        for stop in (0, 1, 2, None):
            given = list(itertools.islice(iter(loader), stop))
            revived = pickle.loads(pickle.dumps(loader))
            assert type(revived) is type(loader)
            assert revived.cursor.offset == loader.cursor.offset == (sum(map(len, given)) if stop else 0)
            assert sum(map(len, revived)) == samples
            skipping = skip_first_batches(loader, 1)
            revived = pickle.loads(pickle.dumps(skipping))
            assert type(revived) is type(skipping)
            assert sum(map(len, revived)) == samples - loader.total_batch_size


@requires("torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("streams", [False, True])
def test_stateful_loader_skips_and_takes_positions(streams):
    """A state, a position and both bring back what follows on torchdata's loader, which skips too; classes are kept."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        torch.manual_seed(7)
        kwargs = {} if streams else {"shuffle": True}
        return prepare(
            DataLoader(Stream(11) if streams else range(11), batch_size=2, **kwargs), use_stateful_dataloader=True
        )

    whole = values(make())
    assert values(skip_first_batches(make(), 1)) == whole[1:]
    loader = make()
    steps = iter(loader)
    next(steps), next(steps)
    position, state = loader.cursor.state_dict(), loader.state_dict()
    by_position, by_state, by_both = make(), make(), make()
    by_position.cursor.load_state_dict(position)
    by_state.load_state_dict(state)
    by_both.cursor.load_state_dict(position)
    by_both.load_state_dict(state)
    assert values(by_position) == values(by_state) == values(by_both) == whole[2:]
    kept = prepare(Doubling(9, factor=3), use_stateful_dataloader=True)
    assert isinstance(kept, Doubling)
    assert values(kept) == [[0, 3], [12, 15], [24, 0]]
    built = DataLoaderShard(range(5), use_stateful_dataloader=True, batch_size=2)
    assert values(built) == [[0, 1], [2, 3], [4]]
    assert all(isinstance(each, StatefulDataLoader) for each in (loader, kept, built))


def test_a_full_batch_costs_four_calls():
    """Beside plain torch, a full step resumes two generators and notes the batch in two calls, and no more."""

    def calls(loader):
        seen = []
        batches = iter(loader)
        next(batches)
        sys.setprofile(lambda frame, event, argument: seen.append(event == "call"))
        try:
            for _ in range(50):
                next(batches)
        finally:
            sys.setprofile(None)
        return sum(seen)

    loader = DataLoader(range(203), batch_size=2)
    assert calls(prepare(loader, 1)) - calls(loader) <= 4 * 50


@pytest.mark.parametrize("streams", [False, True])
def test_one_process_dispatches_where_it_is_asked_to(streams):
    """One process has a dispatcher where dispatching or a slice function is asked for, and hands batches to it."""
    seen = []

    def take(batch, part, process_index, num_processes):
        seen.append((part, process_index, num_processes))
        return batch[part] + 100

    loader = DataLoader(Stream(7) if streams else range(7), batch_size=3)
    plain = prepare(loader, None, None, put_on_device=True)
    asked = prepare(loader, None, None, put_on_device=True, dispatch_batches=True)
    assert type(plain) is DataLoaderShard
    assert type(asked) is DataLoaderDispatcher
    assert values(asked) == values(plain) == [[0, 1, 2], [3, 4, 5], [6]]
    options = {"put_on_device": True, "slice_fn_for_dispatch": take}
    sliced = prepare(loader, None, None, dispatch_batches=None if streams else True, **options)
    assert values(sliced) == [[100, 101, 102], [103, 104, 105], [106]]
    assert seen == [(slice(0, 3), 0, 1), (slice(0, 3), 0, 1), (slice(0, 1), 0, 1)]
    assert sliced.end_of_dataloader
    assert sliced.remainder == 1
