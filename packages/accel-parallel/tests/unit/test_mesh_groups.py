"""With whom a rank of many shares what, for every strategy of a mesh, on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_core.accelerator import Accelerator
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.mesh import data_part

RANK, RANKS = 517, 1024


@pytest.fixture
def one_of_many(request: pytest.FixtureRequest, fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be one of 1,024 ranks, or of as many as a test says, none of which is asked."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # an Accelerator sets it; it is put back
    rank, ranks = getattr(request, "param", (RANK, RANKS))
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group."""
    return tuple(dist.get_process_group_ranks(group))


@pytest.mark.usefixtures("one_of_many")
@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ({"dp_replicate": 128, "tp": 8}, False),
        ({"dp_replicate": 16, "cp": 16, "tp": 4}, False),
        ({"dp_shard": 128, "tp": 8}, True),
        ({"dp_replicate": 4, "dp_shard": 16, "cp": 2, "tp": 8}, True),
    ],
    ids=str,
)
def test_groups_are_those_of_the_layout(sizes: dict[str, int], shards: bool) -> None:
    """Ranks that split, read one sequence, average, shard and copy, are those that arithmetic says."""
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if shards else {}
    axes = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, parallelism_config=axes, **plugin)  # type: ignore[arg-type]
    strategy: Any = accelerator._runtime.strategy
    layout = strategy.layout
    assert (layout.rank, {axis: size for axis, size in layout.sizes if size > 1}) == (RANK, sizes)
    assert strategy.tensor._ranks == layout.group("tp") == ranks_of(strategy.tensor.mesh.get_group())
    assert accelerator.tensor_parallel_rank == layout.group("tp").index(RANK)
    if "cp" in sizes:
        assert ranks_of(strategy.context.group) == layout.group("cp")
    averaged = [axis for axis in ("dp_replicate", "dp_shard", "cp") if sizes.get(axis, 1) > 1]
    assert [ranks_of(group) for group in strategy.averaging._groups] == [layout.group(axis) for axis in averaged]
    if shards:
        *copies, own = strategy.mesh.get_all_groups()
        assert ranks_of(own) == layout.group("dp_shard", "cp")
        assert [ranks_of(group) for group in copies] == [layout.group("dp_replicate")] * ("dp_replicate" in sizes)


@pytest.mark.parametrize("one_of_many", [(5, 16)], indirect=True)
@pytest.mark.usefixtures("one_of_many")
def test_shards_lie_along_sequences_not_tensor_parallel() -> None:
    """Axes for shards are flattened to one, copies come first, and ranks of tensor parallel shard for themselves."""
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    found = data_part(mesh, cpu)
    assert found.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
    assert found.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert data_part(mesh, cpu).get_group("dp_shard_cp") is found.get_group("dp_shard_cp"), "made once"
    for sizes, axes, ranks in (
        ((4, 4), ("dp_shard", "tp"), [1, 5, 9, 13]),
        ((4, 4), ("dp_shard", "cp"), list(range(16))),
        ((2, 8), ("dp_replicate", "cp"), [list(range(8)), list(range(8, 16))]),
    ):
        assert data_part(init_device_mesh("cpu", sizes, mesh_dim_names=axes), cpu).mesh.tolist() == ranks
