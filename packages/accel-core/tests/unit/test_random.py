"""Seeds and generators in one process."""

import random

import pytest
import torch

from accel_core.errors import ConfigurationError, DeviceUnavailableError
from accel_core.host.environ import patch_environment
from accel_core.options.enums import RNGType
from accel_core.random import set_seed, synchronize_rng_state, synchronize_rng_states

pytestmark = pytest.mark.usefixtures("fresh_state")


def draw():
    """Draw from every generator that a seed sets."""
    numpy = pytest.importorskip("numpy")
    return random.random(), numpy.random.rand(), torch.rand(2).tolist()


@pytest.mark.parametrize("number", [0, 42, 2**40 + 7])
def test_a_seed_sets_every_generator(number):
    """Python, numpy and torch draw the same numbers after the same seed, also one too large for numpy."""
    set_seed(number)
    first = draw()
    assert draw() != first
    set_seed(number)
    assert draw() == first


def test_seeding_without_numpy(monkeypatch):
    """Where numpy is not installed the other generators are seeded all the same."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    set_seed(11)
    first = random.random(), torch.rand(2).tolist()
    set_seed(11)
    assert (random.random(), torch.rand(2).tolist()) == first


def test_settings_of_a_seed():
    """The rank is added, also where no state exists yet; `deterministic` switches torch's algorithms."""
    with patch_environment(RANK=3, WORLD_SIZE=4):
        set_seed(5, device_specific=True)
    assert torch.initial_seed() == 8
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_what_cannot_be_synchronized():
    """Unknown words, a missing generator and absent hardware are refused with one process too, whose states stay."""
    generator = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), generator.get_state()
    synchronize_rng_states(["torch", "generator"], generator=generator)
    synchronize_rng_state()
    with pytest.raises(ConfigurationError, match=r"No generator is called 'python'. Use one of torch, cuda"):
        synchronize_rng_states(["python"])
    with pytest.raises(ConfigurationError, match="got generator=None"):
        synchronize_rng_states(["generator"])
    with pytest.raises(DeviceUnavailableError, match="npu"):
        synchronize_rng_state(RNGType.NPU)
    assert torch.get_rng_state().equal(before[0])
    assert generator.get_state().equal(before[1])
