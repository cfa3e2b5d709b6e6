"""transformers' Trainer and trl's SFT train on gloo ranks that share a model or its sequences as one process does."""

from typing import Any

import pytest

SHARDS = "pytorch_model_fsdp_0", "optimizer_0"
LOGGED = ("losses", "norms", "weights", "evaluated")
ARRIVED = [
    *((2, case) for case in ("dp", "fsdp", "tp", "ep")),
    *((4, case) for case in ("dp", "fsdp", "tp", "fsdp x tp", "hsdp", "ep", "ep in copies")),
]


@pytest.mark.parametrize(
    "case", ["version 2", "accumulation", "recomputed", "version 1", "adapters", "adapters, version 1", "arrived"]
)
def test_the_trainer_shards(sharded: Any, assert_close: Any, case: str) -> None:
    """Losses, gradient norms and whole weights of two sharded ranks are those of one process."""
    two, one = (side[case] for side in sharded("fsdp_trainer"))
    assert two["sharded"] == ("version 1" not in case)
    assert not one["sharded"]
    assert_close(two, one, "losses", "norms", "weights")
    if case == "adapters":
        assert two["trained"] == one["trained"] == one["adapters"]


@pytest.mark.parametrize("case", ["sft", "sft of adapters"])
def test_sft_shards(sharded: Any, assert_close: Any, case: str) -> None:
    """Losses and whole weights are those of one process, and only adapters are trained where there are some."""
    two, one = (side[case] for side in sharded("fsdp_trainer"))
    assert two["sharded"]
    assert two["trained"] == one["trained"]
    assert_close(two, one, "losses", "weights")


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


@pytest.mark.parametrize("case", ["arrived", "own plan", "trainer"])
def test_a_split_model_trains(sharded: Any, assert_close: Any, case: str) -> None:
    """Losses, gradient norms and whole weights of two ranks that share a model are those of one process."""
    two, one = (side[case] for side in sharded("tensor_parallel"))
    assert "model.layers.0.self_attn.q_proj.weight" in two["split"]
    assert one["split"] == []
    assert_close(two, one, "losses", "norms", "weights")
    assert two.get("saved") == (two["weights"] if case == "arrived" else None)


@pytest.mark.parametrize("case", ["cp2", "cp2 in a ring", "fsdp2 over cp2"])
def test_ranks_that_share_sequences_train(sharded: Any, assert_close: Any, case: str) -> None:
    """Two ranks, each with half of every sequence, of whose tokens not all count, in windows of two batches."""
    two, one = sharded("mesh_trainer")
    assert two[case]["axes"] == {"tp": 1, "cp": 2}
    assert two[case]["spread"] == ("fsdp2" in case)
    assert_close(two[case], one["one"], *LOGGED)


@pytest.mark.parametrize("case", ["fsdp2 x tp2", "fsdp2 x tp2, arrived"])
def test_ranks_that_share_products_and_shards_train(sharded: Any, assert_close: Any, case: str) -> None:
    """Two by two ranks, of a model that is split by its own plan, or that transformers split while it loaded it."""
    four, one = sharded("mesh_trainer", ranks=4)
    assert four[case]["axes"] == {"tp": 2, "cp": 1}
    assert four[case]["spread"]
    assert_close(four[case], one["one"], *LOGGED)


@pytest.mark.parametrize(("ranks", "case"), ARRIVED)
def test_models_that_arrive_sharded_train_in_the_trainer(
    sharded: Any, assert_close: Any, ranks: int, case: str
) -> None:
    """Losses, norms and weights to five decimals, in windows of two batches, resumed from what another mesh saved."""
    pytest.importorskip("transformers.distributed", reason="needs transformers 5.23, which shards what it loads")
    many, one = sharded("arrived_trainer", ranks=ranks)
    found, expected = many[case], one[many[case]["kind"]]
    assert_close(found, expected, "losses", "norms", "resumed", "weights", within=1e-5)
    if case != "dp":
        assert found["theirs"]
        assert found["ours"]
