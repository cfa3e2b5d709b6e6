"""The Trainer of transformers on models that it shards while it loads them: what it logs is that of one process."""

from typing import Any

import pytest

pytest.importorskip(
    "transformers.distributed", reason="needs transformers 5.23, which shards models while it loads them"
)

CASES = [
    *((2, case) for case in ("dp", "fsdp", "tp", "ep")),
    *((4, case) for case in ("dp", "fsdp", "tp", "fsdp x tp", "hsdp", "ep", "ep in copies")),
]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_models_that_arrive_sharded_train_in_the_trainer(sharded: Any, ranks: int, case: str) -> None:
    """Losses, norms and weights to five decimals, in windows of two batches, resumed from what another mesh saved."""
    many, one = sharded("arrived_trainer", ranks=ranks)
    found, expected = many[case], one[many[case]["kind"]]
    for key in ("losses", "norms", "resumed", "weights"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key
    if case != "dp":
        assert found["theirs"]
        assert found["ours"]
