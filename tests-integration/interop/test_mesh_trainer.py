"""The Trainer of transformers on meshes: losses, gradient norms and whole weights are those of one process."""

from typing import Any

import pytest


@pytest.mark.parametrize("case", ["cp2", "cp2 in a ring", "fsdp2 over cp2"])
def test_ranks_that_share_sequences_train(sharded: Any, case: str) -> None:
    """Two ranks, each with half of every sequence, of whose tokens not all count, in windows of two batches."""
    two, one = sharded("mesh_trainer")
    assert two[case]["axes"] == {"tp": 1, "cp": 2}
    assert two[case]["spread"] == ("fsdp2" in case)
    equal(two[case], one["one"])


@pytest.mark.parametrize("case", ["fsdp2 x tp2", "fsdp2 x tp2, arrived"])
def test_ranks_that_share_products_and_shards_train(sharded: Any, case: str) -> None:
    """Two by two ranks, of a model that is split by its own plan, or that transformers split while it loaded it."""
    four, one = sharded("mesh_trainer", ranks=4)
    assert four[case]["axes"] == {"tp": 2, "cp": 1}
    assert four[case]["spread"]
    equal(four[case], one["one"])


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what two runs logged."""
    for key in ("losses", "norms", "weights", "evaluated"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
