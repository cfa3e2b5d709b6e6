"""Ways to shard, on 2 and 4 ranks, and meshes of 8, in every way to train; run with ACCEL_TEST_STRATEGY_GRID=full."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from several_ranks import COPIES, LAYERS, WHOLE, fsdp, split

from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_core.strategies.strategy import Strategy
from accel_parallel.fsdp1.strategy import FullyShardedWrapperStrategy
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world
from accel_testing.conformance.strategy import Case, StrategyConformance

if os.environ.get("ACCEL_TEST_STRATEGY_GRID") != "full":
    pytest.skip("takes minutes; set ACCEL_TEST_STRATEGY_GRID=full", allow_module_level=True)

GRID = [Case(*way) for way in itertools.product((1, 3), (False, True), (None, 0.05), (False, True))]
FIRST = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WAYS: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    **{
        f"FSDP1 {kind}": (FullyShardedWrapperStrategy, {"fsdp_version": 1, "sharding_strategy": kind}) for kind in FIRST
    },
    **{
        f"FSDP2 {name}reshard={freed}": (FullyShardStrategy, {"fsdp_version": 2, "reshard_after_forward": freed})
        for name in ("", "HYBRID, ")
        for freed in (True, False)
    },
}

MESHES: dict[str, dict[str, int]] = {
    "copies of shards of parts": {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
    "shards along sequences of parts": {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
    "copies of shards along sequences": {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2},
    "copies of parts along sequences": {"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2},
}


class Way(StrategyConformance):
    """One way to shard; copies of shards on 4 ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.strategy, self.given = WAYS[name]

    def arguments(self) -> dict[str, Any]:
        """Return a plugin, and axes where there are copies."""
        copies = "HYBRID" in self.name and ensure().size == 4
        axes = ParallelismConfig(**COPIES) if copies else None
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(**WHOLE, **LAYERS, **self.given),
            "parallelism_config": axes,
        }


class Mesh(StrategyConformance):
    """Eight ranks on three axes; parameters are sharded where there is an axis for it."""

    def __init__(self, name: str) -> None:
        self.sizes_of_axes = MESHES[name]
        self.strategy = FullyShardStrategy if "dp_shard_size" in self.sizes_of_axes else MeshStrategy  # type: ignore[misc]

    def arguments(self) -> dict[str, Any]:
        """Return the axes with a plan, and a plugin where parameters are sharded."""
        plugin = {"fsdp_plugin": fsdp(**WHOLE, **LAYERS)}
        axes = split({"0": "colwise", "2": "rowwise"}, **{"tp_size": 1} | self.sizes_of_axes)
        return {"parallelism_config": axes, **(plugin if "dp_shard_size" in self.sizes_of_axes else {})}


SIZES = [(name, size) for name in WAYS for size in (2, 4) if size == 4 or not name.startswith("FSDP2 HYBRID")]


@pytest.mark.parametrize(("name", "size"), [*SIZES, *((name, 8) for name in MESHES)])
@world("size", quiet=60)
def test_equals_one_process(name: str, size: int) -> None:
    """Weights and norms after every way to train, also on meshes of three axes, are those of one process."""
    way = Mesh(name) if name in MESHES else Way(name)
    for case in GRID:
        try:
            way._equals_one_process(case)
        except AssertionError as failure:
            raise AssertionError(f"{name}, {case}: {failure}") from failure
        reset_all()
    way._trains_on_nothing()
