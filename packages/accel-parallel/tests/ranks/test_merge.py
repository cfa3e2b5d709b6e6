"""Whole weights from the shards of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_core.comm.control import wait_for_all
from accel_core.process.world import ensure
from accel_parallel.checkpoint.merge import _in_shards, merge_weights
from accel_testing import world


@world(2)
def test_shards_of_two_ranks_become_whole(tmp_path: Path) -> None:
    """Rows, columns, copies and ties come out as they went in, with names and dtypes, ties once, piece by piece."""
    here = ensure()
    folder = tmp_path / "pytorch_model_fsdp_0"
    torch.manual_seed(0)
    tensors = {name: torch.randn(5, 3) for name in ("rows", "columns", "copied")}
    tensors |= {"half": torch.randn(7).bfloat16(), "scalar": torch.tensor(3)}
    kinds = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "half": Shard(0)}
    mesh = init_device_mesh("cpu", (2,))
    state = {n: distribute_tensor(t, mesh, [kinds[n]]) if n in kinds else t for n, t in tensors.items()}
    dcp.save({"model": {**state, "tied": state["rows"]}}, checkpoint_id=folder)
    if here.is_main:
        rows: Any = _in_shards(folder)["rows"]
        assert [piece.nbytes for piece in rows.pieces()] == [36, 24]
        merge_weights(folder, tmp_path / "whole")
        torch.testing.assert_close(load_file(tmp_path / "whole" / "model.safetensors"), tensors, rtol=0, atol=0)
        merge_weights(folder, tmp_path / "plain", safe_serialization=False)
        plain = torch.load(tmp_path / "plain" / "pytorch_model.bin", weights_only=True)
        torch.testing.assert_close(plain, tensors | {"tied": tensors["rows"]}, rtol=0, atol=0)
    wait_for_all(here)
