"""Which rank does what, against torch's own meshes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_core.errors import ConfigurationError
from accel_core.mesh.layout import DATA_AXES, GROUPS, MESH_AXES, Layout


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Give a rank of a large world on torch's fake process group."""
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield rank, size
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1024), (517, 1024), (1023, 1024)], indirect=True)
@pytest.mark.parametrize(
    "sizes", [(2, 2, 4, 2, 2, 2, 8), (1, 1, 1024, *[1] * 4), (*[1] * 6, 1024), (4, 32, *[1] * 4, 8)]
)
def test_groups_are_those_of_torchs_mesh(ranks: tuple[int, int], sizes: tuple[int, ...]) -> None:
    """On 1,024 ranks each axis and each named group holds the ranks that a mesh of torch gives it."""
    rank, world_size = ranks
    layout = Layout.of(rank, world_size, dict(zip(MESH_AXES, sizes, strict=True)))
    mesh: Any = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_AXES)
    everyone = torch.arange(world_size).reshape(sizes)
    where = (everyone == rank).nonzero()[0].tolist()
    for axis, coordinate in zip(MESH_AXES, where, strict=True):
        assert layout.place((axis,)) == coordinate == mesh.get_local_rank(axis)
        assert list(layout.group(axis)) == mesh[axis].mesh.tolist()
    for axes in GROUPS.values():
        own = [slice(None) if axis in axes else where[number] for number, axis in enumerate(MESH_AXES)]
        assert list(layout.group(*axes)) == everyone[tuple(own)].flatten().tolist()


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), repeat=7)))
def test_every_part_of_the_data_has_one_reader(sizes: tuple[int, ...]) -> None:
    """Ranks of one replica share a part, parts are numbered without gaps, and each has the first rank as reader."""
    axes = dict(zip(MESH_AXES, sizes, strict=True))
    world_size = torch.Size(sizes).numel()
    layouts = [Layout.of(rank, world_size, axes) for rank in range(world_size)]
    parts = layouts[0].parts
    assert [layout.part for layout in layouts] == list(parts)
    assert sorted(set(parts)) == list(range(layouts[0].replicas))
    assert [parts[rank] for rank in layouts[0].readers] == list(range(layouts[0].replicas))
    for layout in layouts:
        others = [axis for axis in MESH_AXES if axis not in DATA_AXES]
        assert {parts[rank] for rank in layout.group(*others)} == {layout.part}


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"zz": 4}, {}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    """The error says which sizes and how many processes."""
    with pytest.raises(ConfigurationError, match="for 4 processes"):
        Layout.of(0, 4, sizes)
