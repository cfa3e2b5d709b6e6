"""Over which ranks of a mesh parameters are sharded and copied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_core.errors import EngineUnavailableError
from accel_parallel.sharding.mesh import data_part


@pytest.fixture
def rank_5() -> Iterator[None]:
    """Be rank 5 of 16, none of which is asked."""
    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_5")
def test_shards_lie_along_sequences_not_tensor_parallel() -> None:
    """Axes for shards are flattened to one, copies come first, and ranks of tensor parallel shard for themselves."""
    cpu, combined = torch.device("cpu"), ("cp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    found = data_part(mesh, cpu, combined)
    assert found.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
    assert found.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert data_part(mesh, cpu, combined).get_group("dp_shard_cp") is found.get_group("dp_shard_cp"), "made once"
    for sizes, axes, ranks in (
        ((4, 4), ("dp_shard", "tp"), [1, 5, 9, 13]),
        ((4, 4), ("dp_shard", "cp"), list(range(16))),
        ((2, 8), ("dp_replicate", "cp"), [list(range(8)), list(range(8, 16))]),
    ):
        assert data_part(init_device_mesh("cpu", sizes, mesh_dim_names=axes), cpu, combined).mesh.tolist() == ranks
    with pytest.raises(EngineUnavailableError, match=r"got the axes \['cp', 'tp'\]"):
        data_part(mesh, cpu)
