"""transformers' Trainer and trl's SFT train sharded on two gloo ranks as one process trains whole."""

from typing import Any

import pytest

SHARDS = "pytorch_model_fsdp_0", "optimizer_0"


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


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("title", ["trainer", "adapters", "sft", "sft of adapters"])
def test_a_sharded_run_is_saved_and_resumed(resumed: Any, title: str, version: int, kind: str) -> None:
    """Bit for bit as the run that was not interrupted, on every rank, and as one process; the best model comes back."""
    straight, again, one = resumed
    case = f"{title}, version {version}, {kind}"
    there, here, plain = straight[case], again[case], one[f"{title}, version 2, full"]
    for key in ("losses", "evaluated", "norms", "moments", "weights"):
        assert here[key] == there[key]
        assert there[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-5)
    assert [rank["end"] for rank in here["ranks"]] == [rank["end"] for rank in there["ranks"]]
    best = [rank["middle"] for rank in there["ranks"]]
    assert [rank["best"] for rank in there["ranks"]] == best
    assert [rank["best"] for rank in here["ranks"]] == best
    model, optimizer = ("pytorch_model_fsdp.bin", "optimizer.bin") if kind == "full" else SHARDS
    assert {model, optimizer} <= set(there["files"])


def test_only_the_model_is_saved(resumed: Any) -> None:
    """`from_pretrained` reads what save_only_model leaves of a sharded model, bit for bit."""
    assert resumed[0]["only the model"] == [True, True]
