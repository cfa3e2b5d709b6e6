"""Models of transformers train split over two gloo ranks as one process trains them whole."""

from typing import Any

import pytest


@pytest.mark.parametrize("case", ["arrived", "own plan", "trainer"])
def test_a_split_model_trains(sharded: Any, case: str) -> None:
    """Losses, gradient norms and whole weights of two ranks that share a model are those of one process."""
    two, one = (side[case] for side in sharded("tensor_parallel"))
    assert "model.layers.0.self_attn.q_proj.weight" in two["split"]
    assert one["split"] == []
    for key in ("losses", "norms", "weights"):
        assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
    assert two.get("saved") == (two["weights"] if case == "arrived" else None)
