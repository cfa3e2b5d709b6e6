"""Ranks that share a replica of the model read the same samples, and each sample counts once."""

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader

from accel_core.comm.objects import gather_object
from accel_core.data.metrics import gather_for_metrics
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.presharded import already_sharded
from accel_core.mesh.layout import Layout
from accel_core.process.world import ensure
from accel_core.state.gradient import GradientState
from accel_testing import world

SIZES = [
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
    {"tp": 4},
    {"dp_shard": 4},
]


def everything(indices):
    """Make a batch of numbers, names and one tensor a sample."""
    return {
        "number": torch.tensor(indices),
        "name": [str(index) for index in indices],
        "box": [torch.full((index % 3 + 9, 2), float(index)) for index in indices],
    }


def check(loader, layout, expected):
    """Read an epoch, and check what ranks of a replica hold and what is gathered."""
    state, found = GradientState(), []
    for batch in loader:
        parts = gather_object([batch["name"]])
        assert all(parts[rank] == parts[layout.parts.index(part)] for rank, part in enumerate(layout.parts))
        found.append(gather_for_metrics(batch, state))
        assert gather_for_metrics(batch["number"], state).tolist() == found[-1]["number"].tolist()
        assert gather_for_metrics(batch["name"], state, use_gather_object=True) == found[-1]["name"]
    assert [value for part in found for value in part["number"].tolist()] == expected
    assert [name for part in found for name in part["name"]] == [str(value) for value in expected]
    assert [int(box[0, 0]) for part in found for box in part["box"]] == expected


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["map", "dispatched map", "stream", "dispatched stream"])
@world(4)
def test_every_sample_once(kind, sizes):
    """Ten samples are gathered as ten, by whatever part of the world a replica is."""
    layout = Layout.of(ensure().rank, 4, sizes)
    for length in (1, 8, 10):
        data = Stream(length) if "stream" in kind else range(length)
        loader = prepare_data_loader(
            DataLoader(data, batch_size=2, collate_fn=everything), dispatch_batches="dispatched" in kind, layout=layout
        )
        assert loader.spec.ranks == layout.replicas
        check(loader, layout, list(range(length)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@world(4)
def test_uneven_ends(sizes):
    """With even_batches=False, ranks without a batch do not wait, and the first replica has everything."""
    layout, state = Layout.of(ensure().rank, 4, sizes), GradientState()
    for length in range(1, 12):
        loader = prepare_data_loader(
            DataLoader(range(length), batch_size=2, collate_fn=everything), even_batches=False, layout=layout
        )
        found = []
        for batch in loader:
            found += gather_for_metrics(batch, state)["name"]
        expected = [str(value) for value in range(length)]
        assert found == expected if layout.part == 0 else found == expected[: len(found)]


@pytest.mark.parametrize("end", ["repeat", "empty", "drop"])
@world(4)
def test_streams_of_different_lengths(end):
    """Streams of two replicas, of four ranks, that differ in length end together; no sample is lost or doubled."""
    layout = Layout.of(ensure().rank, 4, {"dp_shard": 2, "tp": 2})
    length = (3, 8)[layout.part]
    loader = already_sharded(DataLoader(Stream(length, 100 * layout.part), batch_size=2))
    loader = prepare_data_loader(loader, layout=layout, uneven_end=end)
    state, found = GradientState(), []
    for batch in loader:
        found += gather_for_metrics(batch, state).tolist()
    wanted = (3, 4) if end == "drop" else (3, 8)
    assert sorted(found) == [100 * part + value for part in range(2) for value in range(wanted[part])]


@world(4)
def test_a_device_mesh_decides_where_there_is_no_layout():
    """The parts that a device mesh names count like those of a layout, also where the data's axis is the last one."""
    ensure()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    state = GradientState()
    for dispatch in (False, True):
        loader = prepare_data_loader(
            DataLoader(range(10), batch_size=2), dispatch_batches=dispatch, torch_device_mesh=mesh
        )
        assert loader.parts == (0, 1, 0, 1)
        assert [value for batch in loader for value in gather_for_metrics(batch, state).tolist()] == list(range(10))
