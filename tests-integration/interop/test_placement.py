"""transformers, peft and diffusers place, offload, merge and save models as on Accelerate 1.15.0."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def offload(compare: Callable[[str], Any]) -> Any:
    """Return what transformers and peft found on offloaded models."""
    return compare("offload")


@pytest.fixture(scope="module")
def diffusion(compare: Callable[[str], Any]) -> Any:
    """Return what diffusers found on the CPU."""
    return compare("diffusion")


@pytest.fixture(scope="module")
def diffusion_offload(compare: Callable[[str], Any]) -> Any:
    """Return what diffusers found on a simulated accelerator."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("the simulated accelerator is built by g++ and ninja, and one of them is not installed")
    return compare("diffusion_offload")


@pytest.fixture(scope="module")
def evaluation(compare: Callable[[str], Any]) -> Any:
    """Return what an evaluation loop found."""
    return compare("evaluation")


@pytest.mark.parametrize("case", ["reload", "auto", "adapters", "limited"])
def test_offloaded_models_are_the_originals(offload: Any, case: str) -> None:
    """Outputs, generated tokens, placement and saved weights are those of the original, bit by bit."""
    assert offload.ours[case] == offload.theirs[case]


def test_offloading_changes_nothing(offload: Any) -> None:
    """A model with layers on disk answers, saves and merges like the whole one."""
    assert offload.ours["reload"]["same"]
    assert offload.ours["adapters"]["offloaded equals whole"]
    assert offload.ours["adapters"]["outputs from disk"] == offload.ours["adapters"]["outputs"]


def test_a_limit_in_words_leaves_layers_for_the_disk(offload: Any) -> None:
    """Written limits are understood on the way through transformers, and the answers are those of the whole model."""
    limited = offload.ours["limited"]
    assert "disk" in limited["map"].values()
    assert limited["tokens"] == offload.ours["auto"]["tokens"]


@pytest.mark.parametrize("case", ["pipeline", "device maps"])
def test_diffusers_is_bit_equal(diffusion: Any, case: str) -> None:
    """An offloaded pipeline and mapped models give what they give on the original."""
    assert diffusion.ours[case] == diffusion.theirs[case]


def test_a_pipeline_with_hooks_becomes_a_graph(diffusion: Any) -> None:
    """It is exported, as on the original, and also compiled whole and traced with the weights of an offloaded model."""
    assert diffusion.theirs["graphs"]["exported"]
    assert diffusion.ours["graphs"] == {"exported": True, "traced": True, "compiled whole": True}


@pytest.mark.parametrize(
    "case", ["model offload", "sequential offload", "device map", "device map with CPU and disk", "balanced"]
)
def test_diffusers_offloads_to_an_accelerator(diffusion_offload: Any, case: str) -> None:
    """Images are those of the whole pipeline, bit by bit, and models lie where they lie on the original."""
    ours, theirs = ({name: found for name, found in side[case].items() if name != "peak"} for side in diffusion_offload)
    assert ours["equal"]
    assert ours == theirs


def test_diffusers_needs_less_memory_offloaded(diffusion_offload: Any) -> None:
    """Offloaded models take the original's memory; layers that travel ahead take more, but less than their model."""
    ours, theirs = diffusion_offload
    for case in ("model offload", "device map", "balanced"):
        assert ours[case]["peak"] <= theirs[case]["peak"]
    assert ours["sequential offload"]["peak"] < ours["model offload"]["peak"]


def test_likelihoods_are_bit_equal(evaluation: Any) -> None:
    """An evaluation loop scores every sample as it does on the original, and finds the same batch size."""
    assert evaluation.ours == evaluation.theirs
