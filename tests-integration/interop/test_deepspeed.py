"""transformers' Trainer with `deepspeed=` trains on two gloo ranks as one process trains without."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: `nox -s deepspeed`")
WITH_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
WITH_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


@pytest.mark.parametrize(
    "case",
    [
        "stage 2, dict",
        "stage 2, file",
        "stage 3, dict",
        "stage 3, template",
        "stage 3, loaded",
        pytest.param("stage 3, adapters", marks=WITH_PEFT),
        pytest.param("stage 3, trl", marks=WITH_TRL),
    ],
)
def test_the_trainer_runs_engines(sharded: Any, assert_close: Any, case: str) -> None:
    """Losses, gradient norms, rates and whole weights are those of one process, also after resuming."""
    two, one = (side[case] for side in sharded("deepspeed_trainer"))
    adapted = case.endswith(("adapters", "trl"))
    assert (two["engine"], one["engine"]) == ("DeepSpeedEngine", "PeftModel" if adapted else "LlamaForCausalLM")
    # DeepSpeed moves a schedule that it owns in the step itself, before the Trainer logs the rate.
    left_out = {"engine"} if case.startswith("stage 2") else {"engine", "rates"}
    assert_close(two, one, *(one.keys() - left_out))
    if "resumed" in two:
        assert two["resumed"] == two["weights"]
