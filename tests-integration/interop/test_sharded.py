"""transformers' Trainer and trl's SFT train sharded on two gloo ranks as one process trains whole."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    "case", ["version 2", "accumulation", "recomputed", "version 1", "adapters", "adapters, version 1", "arrived"]
)
def test_the_trainer_shards(sharded: Any, case: str) -> None:
    """Losses, gradient norms and whole weights of two sharded ranks are those of one process."""
    two, one = (side[case] for side in sharded("fsdp_trainer"))
    assert two["sharded"] == ("version 1" not in case)
    assert not one["sharded"]
    for key in ("losses", "norms", "weights"):
        assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
    if case == "adapters":
        assert two["trained"] == one["trained"] == one["adapters"]


@pytest.mark.parametrize("case", ["sft", "sft of adapters"])
def test_sft_shards(sharded: Any, case: str) -> None:
    """Losses and whole weights are those of one process, and only adapters are trained where there are some."""
    two, one = (side[case] for side in sharded("fsdp_trainer"))
    assert two["sharded"]
    assert two["trained"] == one["trained"]
    for key in ("losses", "weights"):
        assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
