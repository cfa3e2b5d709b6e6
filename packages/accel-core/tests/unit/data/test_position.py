"""Positions: any loader can be stopped anywhere and continued, by itself or by another number of ranks."""

import copy
import random

import pytest
import torch
from streams import Pythonic, Stream
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accel_core.data.adapter import stateful_class
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.skip import skip_first_batches
from accel_core.errors import CheckpointMismatchError
from accel_testing import requires

TORCHDATA = ("stateful", "torchdata's own")
pytestmark = pytest.mark.usefixtures("fresh_state")


class Recording:
    """A dataset that notes which samples are read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index


def make(ranks=1, rank=0, *, data=None, size=2, seedable=False, seed=7, **kwargs):
    """Prepare a shuffled loader as one of several ranks, by default from the same seed."""
    torch.manual_seed(seed)
    data = range(13) if data is None else data
    options = {} if isinstance(data, IterableDataset) or "batch_sampler" in kwargs else {"shuffle": True}
    options |= {} if "batch_sampler" in kwargs else {"batch_size": size}
    loader = DataLoader(data, **options, **kwargs)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, use_seedable_sampler=seedable)


def values(loader):
    """Return an epoch as lists."""
    return [batch.tolist() for batch in loader]


def stop_after(loader, steps):
    """Read some batches of an epoch, then take the position and break off."""
    read = []
    for batch in loader:
        read.append(batch.tolist())
        if len(read) == steps:
            return read, loader.cursor.state_dict()
    return read, loader.cursor.state_dict()


@pytest.mark.parametrize("kind", ["shuffled", "seedable", "stream"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stop_and_go_on_at_every_step(ranks, kind):
    """Stopped after any number of steps, what was read and what follows are the uninterrupted epochs, of any seed."""
    data, seedable = Stream(13) if kind == "stream" else None, kind == "seedable"
    for rank in range(ranks):
        whole = make(ranks, rank, data=data, seedable=seedable)
        first, second = values(whole), values(whole)
        for steps in range(1, len(first) + 1):
            loader = make(ranks, rank, data=data, seedable=seedable)
            read, position = stop_after(loader, steps)
            torch.manual_seed(7)
            torch.empty((), dtype=torch.int64).random_()
            default = torch.get_rng_state()
            resumed = make(ranks, rank, data=data, seedable=seedable, seed=99)
            torch.set_rng_state(default)
            resumed.cursor.load_state_dict(position)
            rest = values(resumed) if steps < len(first) else []
            assert read + rest == first, (rank, steps)
            if ranks > 1 or kind != "shuffled":
                assert values(resumed) == second


def test_stopping_twice_in_an_epoch():
    """A position taken after a resume is counted from the start of the epoch."""
    first = values(make(2, 1))
    read, position = stop_after(make(2, 1), 1)
    again = make(2, 1)
    again.cursor.load_state_dict(position)
    assert again.cursor.state_dict()["offset"] == 4
    more, position = stop_after(again, 2)
    assert position["offset"] == 12
    last = make(2, 1)
    last.cursor.load_state_dict(position)
    assert read + more + values(last) == first


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_another_number_of_ranks(before, after, size, streams):
    """The rest of the epoch, read by any number of ranks, holds each remaining sample; repeats come at the end."""

    def prepared(ranks, rank=0):
        return make(ranks, rank, size=size, data=Stream(13) if streams else None)

    def dealt(loaders):
        return [value for step in zip(*map(values, loaders), strict=True) for part in step for value in part]

    order = dealt(prepared(before, rank) for rank in range(before))[:13]
    for steps in range(1, len(values(prepared(before)))):
        _, position = stop_after(prepared(before), steps)
        loaders = [prepared(after, rank) for rank in range(after)]
        for loader in loaders:
            loader.cursor.load_state_dict(position)
        rest, left = dealt(loaders), order[position["offset"] :]
        assert rest[: len(left)] == left
        assert len(rest) - len(left) < after * size


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_skipped_is_read(ranks, workers):
    """Neither a resume nor a skip reads a sample before the position, with any number of workers."""
    data = Recording(40)
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = make(ranks, data=data, **kwargs)
    whole = values(make(ranks, data=Recording(40)))
    _, position = stop_after(make(ranks, data=Recording(40)), 5)
    loader.cursor.load_state_dict(position)
    rest = values(loader)
    assert rest == whole[5:]
    skipped = [batch.tolist() for batch in skip_first_batches(make(ranks, data=data, **kwargs), 5)]
    assert skipped == whole[5:]
    wanted = [value for batch in rest for value in batch]
    assert data.read == ([] if workers else wanted * 2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "found"), [(Recording, "8 samples"), (Stream, "fewer samples"), ("units", "4 batches")]
)
def test_data_that_end_before_the_position_are_told(kind, found, ranks, caplog):
    """The next epoch is read, with one warning that names both lengths; where the data are whole there is none."""

    def prepared(length):
        if kind == "units":
            return make(ranks, data=range(20), batch_sampler=[[at, at + 1] for at in range(0, length, 2)])
        return make(ranks, data=kind(length))

    read, position = stop_after(prepared(20), 6 // ranks)
    shorter = prepared(8)
    shorter.cursor.load_state_dict(position)
    whole = values(shorter)
    assert sum(map(len, whole)) == 8 // ranks
    (record,) = caplog.records
    assert f"got {found}, and a position after {position['offset']} {position['unit']}." in record.getMessage()
    again = prepared(20)
    again.cursor.load_state_dict(position)
    assert read + values(again) == values(prepared(20))
    assert len(caplog.records) == 1


class Named(DataLoader):
    """A loader class of a user that iterates in its own way."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 100


def test_a_loader_that_iterates_itself_goes_on():
    """The order of the interrupted epoch comes back too where the user's class begins to read late."""
    torch.manual_seed(7)
    loader = prepare_data_loader(Named(range(13), batch_size=2, shuffle=True), num_processes=1, process_index=0)
    steps = iter(loader)
    read = [next(steps).tolist() for _ in range(3)]
    position, state = loader.cursor.state_dict(), torch.get_rng_state()
    rest = [batch.tolist() for batch in steps]
    torch.manual_seed(8)
    resumed = prepare_data_loader(Named(range(13), batch_size=2, shuffle=True), num_processes=1, process_index=0)
    torch.set_rng_state(state)
    resumed.cursor.load_state_dict(position)
    assert values(resumed) == rest
    assert sorted(value for batch in read + rest for value in batch) == list(range(100, 113))


def test_batches_without_a_fixed_size_are_counted_whole():
    """Where batches have no fixed size, the position counts batches, and other ranks go on from it too."""
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    _, position = stop_after(make(2, data=range(9), batch_sampler=batches), 1)
    assert (position["offset"], position["unit"]) == (2, "batches")
    loader = make(1, data=range(9), batch_sampler=batches)
    loader.cursor.load_state_dict(position)
    assert values(loader) == [[3, 4, 5], [6], [7, 8]]


@pytest.mark.parametrize("seedable", [False, True])
def test_skip_takes_the_place_of_a_loaded_position(seedable):
    """skip_first_batches counts from the start of the epoch, also after a position was loaded; the epoch then ends."""
    whole = make(2, seedable=seedable)
    first, second, third = values(whole), values(whole), values(whole)
    source = make(2, seedable=seedable)
    values(source)
    _, position = stop_after(source, 2)
    loader = make(2, seedable=seedable, seed=1)
    loader.cursor.load_state_dict(position)
    rest = skip_first_batches(loader, 2)
    assert len(rest) == len(second) - 2
    steps = iter(rest)
    assert next(steps).tolist() == second[2]
    assert loader.cursor.state_dict()["offset"] == 12
    assert [batch.tolist() for batch in steps] == second[3:]
    assert values(loader) == third
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 2)), ((2, 2), (2, 0)), ((3, 0), (2, 2)), ((1, 2), (1, 1))])
def test_streams_split_by_worker_need_the_same_workers(before, after):
    """Parts of a stream that workers read are taken up by as many ranks and workers, and refused by others."""

    def parted(ranks, workers):
        kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        return make(ranks, data=Stream(24, parted=True), **kwargs)

    whole = values(parted(*before))
    read, position = stop_after(parted(*before), 2)
    same, other = parted(*before), parted(*after)
    same.cursor.load_state_dict(position)
    assert read + values(same) == whole
    other.cursor.load_state_dict(position)
    found = f"{before[0]} ranks with {before[1]} workers .* {after[0]} ranks with {after[1]} workers"
    with pytest.raises(CheckpointMismatchError, match=found):
        values(other)
    assert values(other)[0] == values(parted(*after))[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_single_samples_go_on(ranks):
    """A loader that does not batch reads single samples on any number of ranks, also from a position on."""
    for rank in range(ranks):

        def single(rank=rank):
            return make(ranks, rank, data=[f"sample {index}" for index in range(7)], size=None)

        whole = list(single())
        assert all(type(sample) is str for sample in whole)
        source = single()
        steps = iter(source)
        assert [next(steps)] == whole[:1]
        loader = single()
        loader.cursor.load_state_dict(source.cursor.state_dict())
        assert list(loader) == whole[1:]
        assert list(skip_first_batches(single(), 1)) == whole[1:]


@pytest.mark.parametrize("size", [2, None])
@pytest.mark.parametrize("sampler", [Pythonic, RandomSampler])
def test_generators_are_left_alone_by_a_resume(sampler, size):
    """Orders drawn from Python's generator and from torch's come back, and the generators are left as they are."""

    def single():
        loader = DataLoader(torch.arange(9), batch_size=size, sampler=sampler(range(9)))
        return prepare_data_loader(loader, num_processes=1)

    def seed(number):
        torch.manual_seed(number)
        random.seed(number)

    seed(3)
    source = single()
    steps = iter(source)
    next(steps), next(steps), next(steps)
    position, rest = source.cursor.state_dict(), values(steps)
    seed(4)
    state, drawn = random.getstate(), torch.get_rng_state()
    loader = single()
    loader.cursor.load_state_dict(position)
    steps = iter(loader)
    assert next(steps).tolist() == rest[0]
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), drawn)
    assert values(steps) == rest[1:]


class Noisy(Pythonic):
    """A sampler that sorts by normal numbers of Python's generator and of another one."""

    def __init__(self, data, other):
        super().__init__(data)
        self.other = other

    def __iter__(self):
        return iter(sorted(self.data, key=lambda _: random.gauss(0, 1) + self.other()))


@pytest.mark.parametrize("kept", [0, 1])
def test_samplers_that_draw_normal_numbers(kept):
    """Generators keep every second normal number for the next draw; the order comes back with and without one."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    random.seed(3)
    np.random.seed(3)
    for _ in range(kept):
        random.gauss(0, 1)
        np.random.randn()
    noisy = DataLoader(range(40), batch_size=4, sampler=Noisy(range(40), np.random.randn))
    source, loader = prepare_data_loader(noisy, num_processes=1), prepare_data_loader(noisy, num_processes=1)
    steps = iter(source)
    next(steps)
    position, rest = source.cursor.state_dict(), values(steps)
    loader.cursor.load_state_dict(position)
    assert values(loader) == rest


@pytest.mark.slow
def test_batches_out_of_order_have_no_position():
    """A position of a loader whose workers may overtake each other is refused by it, and can be given up."""
    kwargs = {"num_workers": 2, "multiprocessing_context": "fork", "in_order": False}
    loader = prepare_data_loader(DataLoader(range(12), batch_size=2, **kwargs), num_processes=1, process_index=0)
    steps = iter(loader)
    next(steps)
    position = loader.cursor.state_dict()
    del steps
    loader.cursor.load_state_dict(position)
    with pytest.raises(CheckpointMismatchError, match="position 2 of a loader with in_order=False and 2 workers"):
        values(loader)
    other = prepare_data_loader(DataLoader(range(12), batch_size=2), num_processes=1, process_index=0)
    other.cursor.load_state_dict(position)
    with pytest.raises(CheckpointMismatchError, match="out of order"):
        values(other)
    loader.cursor.rewind()
    assert sorted(value for batch in loader for value in batch.tolist()) == list(range(12))


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_position_taken_in_inference_mode_is_loaded_in_any(dispatch):
    """What an evaluation inside of inference mode leaves behind can be copied, loaded and read on outside of it."""

    def make():
        data = DataLoader(range(10), batch_size=2, shuffle=True)
        return prepare_data_loader(data, num_processes=1, process_index=0, dispatch_batches=dispatch)

    loader = make()
    with torch.inference_mode():
        batches = iter(loader)
        first = next(batches).tolist() + next(batches).tolist()
        position = loader.cursor.state_dict()
    left = [value for batch in batches for value in batch.tolist()]
    resumed = make()
    resumed.cursor.load_state_dict(copy.deepcopy(position))
    assert [value for batch in resumed for value in batch.tolist()] == left
    resumed.cursor.load_state_dict(position)
    with torch.inference_mode():
        assert [value for batch in resumed for value in batch.tolist()] == left
    assert sorted(first + left) == list(range(10))
    torch.rand(1)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(("ranks", "dispatch"), [(1, None), (2, None), (1, True)])
def test_the_end_of_an_epoch_is_the_start_of_the_next(ranks, dispatch, behind):
    """A position taken at the last batch or behind it, whose generator moves at the very end, begins the next epoch."""

    def twelve(seed=3):
        torch.manual_seed(seed)
        loader = DataLoader(range(12), 2, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return prepare_data_loader(loader, num_processes=ranks, process_index=0, dispatch_batches=dispatch)

    whole = twelve()
    first, second = values(whole), values(whole)
    read, position = stop_after(twelve(), len(first) + behind)
    resumed = twelve(4)
    resumed.cursor.load_state_dict(position)
    assert (resumed.cursor.epoch, resumed.cursor.offset, resumed.steps_done) == (1, 0, 0)
    assert (read, values(resumed)) == (first, second)


def test_a_rest_that_is_too_small_begins_the_next_epoch(caplog):
    """Where drop_last leaves nothing of an epoch for more ranks, the next comes whole, and no data are missing."""
    _, position = stop_after(make(1, size=4, drop_last=True), 2)
    loader = make(4, size=4, data=range(17), drop_last=True)
    loader.cursor.load_state_dict(position)
    assert len(values(loader)) == len(loader)
    assert loader.iteration == 2
    _, position = stop_after(make(1, size=4, drop_last=True, data=Stream(13)), 2)
    loader = make(3, size=4, drop_last=True, data=Stream(13))
    loader.cursor.load_state_dict(position)
    assert values(loader) == [[0, 1, 2, 3]]
    assert not caplog.records


def test_a_rank_without_a_rest_waits_for_those_that_have_one():
    """With even_batches=False a rank that has no batch left gives none while another rank has one."""

    def uneven(rank):
        return prepare_data_loader(DataLoader(range(10), 2), num_processes=2, process_index=rank, even_batches=False)

    loaders = [uneven(rank) for rank in range(2)]
    _, position = stop_after(uneven(0), 2)
    for loader in loaders:
        loader.cursor.load_state_dict(position)
    assert [values(loader) for loader in loaders] == [[[8, 9]], []]
    assert stop_after(uneven(1), 2)[1]["offset"] == position["offset"]


def test_a_position_inside_a_batch_of_a_stream_is_refused():
    """A stream that only skips whole batches refuses to go on inside one, and does where its own batches end there."""
    _, position = stop_after(make(1, data=Stream(23), size=3), 2)
    loader = make(1, data=Stream(23), size=4)
    loader.cursor.load_state_dict(position)
    with pytest.raises(CheckpointMismatchError, match=r"position 6 lies inside a batch .* 4 samples, and of 3"):
        values(loader)
    loader = make(1, data=Stream(23), size=2)
    loader.cursor.load_state_dict(position)
    assert [value for batch in values(loader) for value in batch] == list(range(6, 23))


@pytest.mark.slow
def test_persistent_workers_begin_late_for_one_epoch_alone():
    """Where workers have to begin inside a global batch, those that persist read whole epochs before and after it."""
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    _, position = stop_after(make(3, data=Stream(23)), 1)
    loader = make(2, data=Stream(23), **options)
    whole = values(loader)
    loader.cursor.load_state_dict(position)
    assert values(loader)[0] == [6, 7]
    assert values(loader) == values(loader) == whole
    loader._iterator._shutdown_workers()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["plain", *(pytest.param(kind, marks=requires("torchdata")) for kind in TORCHDATA)])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_persistent_workers_go_on_in_any_epoch(ranks, own_generator, kind):
    """Workers that persist take no seed in later epochs; a new process gives the rest, and what follows, in order."""

    def persistent():
        torch.manual_seed(1)
        options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
        if own_generator:
            options["generator"] = torch.Generator().manual_seed(4)
        own_class = stateful_class() if kind == "torchdata's own" else DataLoader
        loader = own_class(range(14), batch_size=2, shuffle=True, **options)
        stateful = kind != "plain"
        made = prepare_data_loader(loader, num_processes=ranks, process_index=0, use_stateful_dataloader=stateful)
        torch.manual_seed(5)
        return made

    whole = persistent()
    epochs = [values(whole) for _ in range(3)]
    whole._iterator._shutdown_workers()
    for steps in (2, len(epochs[1])):
        source = persistent()
        assert values(source) == epochs[0]
        read, position = stop_after(source, steps)
        state, drawn = source.state_dict() if kind != "plain" else None, torch.get_rng_state()
        source._iterator._shutdown_workers()
        resumed = persistent()
        resumed.cursor.load_state_dict(position)
        if state is not None:
            resumed.load_state_dict(state)
        torch.set_rng_state(drawn)
        rest = values(resumed) if steps < len(epochs[1]) else []
        assert read + rest == epochs[1]
        following = values(resumed)
        resumed._iterator._shutdown_workers()
        assert following == epochs[2]
