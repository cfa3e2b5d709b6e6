"""What the reading rank sends to each rank, tried exhaustively without processes."""

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core.data.base import EpochState
from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.settings import LoaderSettings, mesh_parts
from accel_core.errors import DataError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Reading(DataLoaderDispatcher):
    """A dispatcher that stands for the reading rank of several."""

    ranks = 1

    @property
    def parts(self):
        """One part a rank."""
        return tuple(range(self.ranks))


def steps_of(loader, ranks, **kwargs):
    """Return what the reading rank would send in each step."""
    reading = Reading.adopt(loader, settings=LoaderSettings(**kwargs))
    reading.ranks = ranks
    return [(group.shares, group.counts) for group in reading._global_batches(iter(loader), EpochState())]


def test_batches_of_different_widths():
    """Batches that cannot be joined go whole to the ranks; the last step repeats the first batches."""
    widths = [3, 5, 4]
    loader = DataLoader([torch.zeros(2, width) for width in widths], batch_size=None)
    steps = steps_of(loader, 2)
    assert [[tuple(share.shape) for share in shares] for shares, _ in steps] == [[(2, 3), (2, 5)], [(2, 4), (2, 3)]]
    assert steps[1][1].real == (2, 0)


def test_a_batch_that_tells_no_size_cannot_be_cut():
    """Cutting something without rows is refused with what to do; whole, it goes round the ranks."""
    loader = DataLoader([7, 8, 9], batch_size=None)
    assert [shares for shares, _ in steps_of(loader, 2)] == [[7, 8], [9, 7]]
    with pytest.raises(DataError, match=r"no 2 equal parts; got int. Use split_batches=False"):
        steps_of(loader, 2, split_batches=True)


class Mesh:
    """The facts of a device mesh of 2 x 2 x 2 ranks."""

    mesh_dim_names = ("dp_replicate", "tp", "dp_shard")
    mesh = torch.arange(8).view(2, 2, 2)


def test_parts_on_a_mesh():
    """Ranks that differ along an axis of the model alone read the same part, in whatever order the mesh has them."""
    mesh = Mesh()
    assert mesh_parts(mesh) == (0, 1, 0, 1, 2, 3, 2, 3)
    mesh.mesh = mesh.mesh.flip(0)
    assert mesh_parts(mesh) == (2, 3, 2, 3, 0, 1, 0, 1)
