"""The layout of ranks: sizes, names, refusals, and the mesh itself on torch's fake process group."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import RowwiseParallel

from accel_core.errors import ConfigurationError, UnsupportedTypeError
from accel_core.host.environ import patch_environment
from accel_core.plugins import parallelism
from accel_core.plugins.parallelism import ParallelismConfig


@pytest.fixture
def ranks_24() -> Iterator[None]:
    """Make this process rank 5 of 24 on the process group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=24)
    yield
    dist.destroy_process_group()


def test_one_rank_has_no_axes() -> None:
    """Without sizes every axis holds one rank and none is active; a mesh of several needs a kind of device."""
    config = ParallelismConfig()
    assert config.total_size == config.data_parallel_size == config.non_data_parallel_size == 1
    assert config.active_mesh_dims == []
    assert config.fsdp_dim_names == [], "a mesh without the axis has no group of that name"
    assert config.build_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2, dp_shard_size=2).build_device_mesh("cpu") is None, "DeepSpeed lays it out"
    with pytest.raises(ConfigurationError, match="device_type"):
        ParallelismConfig(dp_shard_size=2).get_device_mesh()


@pytest.mark.parametrize(
    ("sizes", "data", "others", "shard_cp", "loss", "fsdp"),
    [
        (
            {"dp_replicate_size": 2, "dp_shard_size": 4},
            ["dp_replicate", "dp_shard"],
            [],
            ["dp_shard"],
            ["dp_replicate", "dp_shard"],
            ["dp_replicate", "dp_shard_cp"],
        ),
        (
            {"dp_shard_size": 4, "cp_size": 2},
            ["dp_shard"],
            ["cp"],
            ["dp_shard", "cp"],
            ["dp_shard", "cp"],
            ["dp_shard_cp"],
        ),
        ({"dp_shard_size": 2, "sp_size": 2}, ["dp_shard"], ["sp"], ["dp_shard"], ["dp_shard"], ["dp_shard_cp"]),
        ({"tp_size": 2, "cp_size": 2}, [], ["tp", "cp"], ["cp"], ["cp"], ["dp_shard_cp"]),
        ({"tp_size": 2, "pp_size": 2}, [], ["tp", "pp"], [], [], []),
        ({"tp_size": 2, "ep_size": 2}, ["ep"], ["tp"], ["ep"], ["ep"], ["dp_shard_cp"]),
    ],
)
def test_axes_are_named_by_their_job(
    sizes: dict[str, int], data: list[str], others: list[str], shard_cp: list[str], loss: list[str], fsdp: list[str]
) -> None:
    """Each list of axes holds those that do its job, in order."""
    config = ParallelismConfig(**sizes)  # type: ignore[arg-type]
    assert config.dp_dim_names == data
    assert config.non_dp_dim_names == others
    assert config.dp_shard_cp_dim_names == shard_cp
    assert config.dp_cp_dim_names == loss
    assert config.fsdp_dim_names == fsdp
    assert config.active_mesh_dims == data + others
    assert config.data_parallel_size * config.non_data_parallel_size == config.total_size


def test_environment_fills_the_sizes() -> None:
    """Sizes, backends and handlers come from PARALLELISM_CONFIG_*, and an argument is stronger."""
    sizes = {"DP_REPLICATE_SIZE": 2, "DP_SHARD_SIZE": 3, "CP_SIZE": 2, "CP_COMM_STRATEGY": "alltoall"}
    with patch_environment(**{f"PARALLELISM_CONFIG_{name}": value for name, value in sizes.items()}):
        config = ParallelismConfig(dp_shard_size=4)
    assert (config.dp_replicate_size, config.dp_shard_size, config.cp_size) == (2, 4, 2)
    assert config.cp_handler is not None
    assert config.cp_handler.cp_comm_strategy == "alltoall"
    sequence = {"SIZE": 2, "SEQ_LENGTH": 8, "SEQ_LENGTH_IS_VARIABLE": "false", "ATTN_IMPLEMENTATION": "sdpa"}
    with patch_environment(**{f"PARALLELISM_CONFIG_SP_{name}": value for name, value in sequence.items()}):
        handler = ParallelismConfig().sp_handler
    assert handler is not None
    assert (handler.sp_seq_length, handler.sp_seq_length_is_variable) == (8, False)
    assert handler.sp_attn_implementation == "sdpa"


def _fixed(length: int) -> parallelism.DeepSpeedSequenceParallelConfig:
    return parallelism.DeepSpeedSequenceParallelConfig(sp_seq_length=length, sp_seq_length_is_variable=False)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ParallelismConfig, {"tp_size": 0}, r"tp_size=0"),
        (ParallelismConfig, {"dp_shard_size": -1}, r"dp_shard_size=-1"),
        (ParallelismConfig, {"cp_size": 2, "sp_size": 2}, r"exclude each other.*cp_size=2 and sp_size=2"),
        (ParallelismConfig, {"cp_backend": "rings"}, r"'rings'.*torch"),
        (ParallelismConfig, {"sp_backend": "rings"}, r"'rings'.*deepspeed"),
        (ParallelismConfig, {"sp_size": 4, "sp_handler": _fixed(6)}, r"equal parts; got sp_seq_length=6 and sp_size=4"),
        (ParallelismConfig, {"cp_size": 2, "cp_handler": 3}, r"cp_handler.*int.*TorchContextParallelConfig"),
        (parallelism.DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "eager"}, r"'eager'.*sdpa"),
        (parallelism.DeepSpeedSequenceParallelConfig, {"sp_seq_length_is_variable": False}, r"no sp_seq_length"),
        (parallelism.TorchContextParallelConfig, {"cp_comm_strategy": "post"}, r"'post'.*allgather"),
        (parallelism.TorchTensorParallelConfig, {"tp_plan": {}}, "got tp_plan={}"),
        (parallelism.TorchTensorParallelConfig, {"tp_plan": "colwise"}, "got tp_plan='colwise'"),
        (parallelism.TorchTensorParallelConfig, {"tp_plan": None}, "got tp_plan=None"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: type, arguments: dict[str, Any], words: str) -> None:
    """Sizes, backends, attentions, plans and combinations that cannot be are refused with what to change."""
    with pytest.raises((ConfigurationError, UnsupportedTypeError), match=words):
        kind(**arguments)
    assert parallelism.DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")


@pytest.mark.usefixtures("ranks_24")
def test_ranks_stand_in_the_stated_order() -> None:
    """Neighbors share a matrix product first, copies of the model are farthest apart."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=2, tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert mesh.mesh.tolist()[0] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert config.get_device_mesh() is config.device_mesh is mesh
    with pytest.raises(ConfigurationError, match=r"'cpu'.*'cuda'"):
        config.get_device_mesh("cuda")


@pytest.mark.usefixtures("ranks_24")
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
def test_flattened_axes_can_be_had_by_name() -> None:
    """The mesh knows which ranks read different data, share parameters and average a loss."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=2, tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert mesh is not None
    assert mesh["dp"].mesh.tolist() == [1, 5, 9, 13, 17, 21]
    assert mesh["dp_shard_cp"].mesh.tolist() == [1, 3, 5, 7, 9, 11]
    assert mesh["dp_cp"].mesh.tolist() == list(range(1, 24, 2))


def test_other_libraries_can_lay_the_mesh_out(ranks_24: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the active axes and sizes by `_get_mesh`, and flattened axes are asked for by lists of names."""
    config = ParallelismConfig(dp_replicate_size=3, dp_shard_size=4, cp_size=2)
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp"), (3, 4, 2))
    asked: list[object] = []
    real = DeviceMesh.__getitem__
    monkeypatch.setattr(DeviceMesh, "__getitem__", lambda mesh, names: (asked.append(names), real(mesh, names))[1])
    assert config.get_device_mesh("cpu") is not None
    assert asked == [["dp_replicate", "dp_shard"], ["dp_shard", "cp"], ["dp_replicate", "dp_shard", "cp"]]
    assert pickle.loads(pickle.dumps(config)).device_mesh is None


def test_everything_can_be_written_as_json() -> None:
    """The configuration, with its handlers, survives JSON."""
    handler = parallelism.TorchTensorParallelConfig(tp_plan={"up": "colwise", "down": RowwiseParallel()})
    config = ParallelismConfig(dp_shard_size=2, cp_size=2, tp_size=2, tp_handler=handler)
    written = json.loads(json.dumps(config.to_json()))
    assert written["tp_handler"]["tp_plan"] == {"up": "colwise", "down": "RowwiseParallel"}
    assert written["cp_handler"] == {"cp_comm_strategy": "allgather"}
    assert written["dp_shard_size"] == 2
    assert "total_size=8" in repr(config)
