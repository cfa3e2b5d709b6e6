"""Loops that the libraries' examples write: an adapter of peft and a diffusion model are trained, saved and loaded."""

from collections.abc import Callable
from typing import Any

import pytest

CASES = [
    ("adapters", "lora"),
    ("adapters", "dropout in bf16"),
    ("adapters", "dora"),
    ("diffusion_loop", "loop"),
    ("diffusion_loop", "loop in bf16"),
]


@pytest.fixture(scope="module")
def adapters(compare: Callable[..., Any]) -> dict[int, Any]:
    """Return what peft found in one process and on two gloo ranks."""
    return {ranks: compare("adapters", ranks) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def diffusion_loop(compare: Callable[..., Any]) -> dict[int, Any]:
    """Return what diffusers found in one process and on two gloo ranks."""
    return {ranks: compare("diffusion_loop", ranks) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def devices(on_devices: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what both found on two simulated accelerators."""
    return {name: on_devices(name) for name in ("adapters", "diffusion_loop")}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_one_process_is_bit_equal(request: pytest.FixtureRequest, name: str, case: str) -> None:
    """Losses and weights, also those that were loaded, are those of the original, bit by bit."""
    found = request.getfixturevalue(name)[1]
    assert found.ours[case]["restored"] != found.ours[case]["weights"]
    assert found.ours[case] == found.theirs[case]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_two_ranks_train_alike(
    request: pytest.FixtureRequest, assert_alike: Callable[..., None], name: str, case: str
) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    found = request.getfixturevalue(name)[2]
    assert_alike(found.ours[case], found.theirs[case])


@pytest.mark.parametrize(("name", "case"), [pair for pair in CASES if "bf16" not in pair[1]])
def test_two_devices_train_alike(
    request: pytest.FixtureRequest, devices: Any, assert_alike: Callable[..., None], name: str, case: str
) -> None:
    """Two simulated accelerators train, save and load as two ranks on the CPU."""
    assert_alike(devices[name][case], request.getfixturevalue(name)[2].ours[case])
