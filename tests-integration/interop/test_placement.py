"""transformers, peft and diffusers place, offload, merge and save models as on Accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def offload(compare: Callable[..., Any]) -> Any:
    """Return what transformers and peft found on offloaded models."""
    return compare("offload")


@pytest.fixture(scope="module")
def diffusion(compare: Callable[..., Any]) -> Any:
    """Return what diffusers found."""
    return compare("diffusion")


@pytest.fixture(scope="module")
def evaluation(compare: Callable[..., Any]) -> Any:
    """Return what evaluation loops found."""
    return compare("evaluation")


@pytest.mark.parametrize("case", ["reload", "auto", "adapters"])
def test_offloaded_models_are_the_originals(offload: Any, case: str) -> None:
    """Outputs, generated tokens, placement and saved weights are those of the original, bit by bit."""
    assert offload.ours[case] == offload.theirs[case]


def test_offloading_changes_nothing(offload: Any) -> None:
    """A model with layers on disk answers, saves and merges like the whole one."""
    assert offload.ours["reload"]["same"]
    assert offload.ours["adapters"]["offloaded equals whole"]
    assert offload.ours["adapters"]["outputs from disk"] == offload.ours["adapters"]["outputs"]


@pytest.mark.parametrize("case", ["loop", "loop in bf16", "pipeline"])
def test_diffusers_is_bit_equal(diffusion: Any, case: str) -> None:
    """An example's training loop and an offloaded pipeline give what they give on the original."""
    assert diffusion.ours[case] == diffusion.theirs[case]


@pytest.mark.parametrize("case", ["encode", "likelihoods"])
def test_evaluation_is_bit_equal(evaluation: Any, case: str) -> None:
    """Encoding with sentence-transformers and scoring likelihoods give what they give on the original."""
    assert evaluation.ours[case] == evaluation.theirs[case]
