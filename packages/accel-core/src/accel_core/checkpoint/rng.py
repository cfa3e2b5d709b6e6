"""Random number generators of Python, NumPy, torch and the device: saved as plain data, restored or derived."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.devices.device import module_of
from accel_core.errors import CheckpointMismatchError
from accel_core.process.world import World

_PYTHON = "random_state"
_NUMPY = "numpy_random_seed"
_TORCH = "torch_manual_seed"
_WORDS = {_PYTHON: 625, _NUMPY: 624}


def collect(world: World) -> dict[str, Any]:
    """Return the states of all random generators of this process as tensors, lists, tuples and numbers.

    The keys are those of Accelerate. NumPy's state is left out if NumPy is not imported.
    """
    states: dict[str, Any] = {_PYTHON: random.getstate()}
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        states[_NUMPY] = (str(name), [int(word) for word in words], *rest)
    states[_TORCH] = torch.get_rng_state()
    if world.device.type != "cpu":
        found = _device_states(world)
        if found:
            states[_device_key(world)] = found
    return states


def check(states: Any, world: World) -> None:
    """Make sure that `restore` will succeed."""
    try:
        # Into generators made for it: those of the process stay as they are until all ranks have compared.
        random.Random().setstate(_words_state(states, _PYTHON))
        torch.Generator().set_state(states[_TORCH])
        if _NUMPY in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(_words_state(states, _NUMPY))
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointMismatchError(
            f"The random states do not fit this process; got {type(error).__name__}: {error}. "
            "Load another checkpoint, or pass strict=False to continue with the current random states."
        ) from error


def restore(states: dict[str, Any], world: World, owner: int | None = None) -> None:
    """Restore what `collect` returned on this rank or, if that is another one, its owner, here or in Accelerate."""
    random.setstate(_words_state(states, _PYTHON))
    torch.set_rng_state(states[_TORCH])
    if _NUMPY in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_words_state(states, _NUMPY))
    found = states.get(_device_key(world))
    if found is None:
        return
    if isinstance(found, torch.Tensor):
        world.hardware.set_rng_state(found)
        return
    apart = world.rank - owner if owner is not None else 0
    if apart and found:  # of all devices, the one with which the owner computes
        own = world.device.index or 0
        world.hardware.module.set_rng_state(found[min(max(own - apart, 0), len(found) - 1)], own)
        return
    for number, state in enumerate(found[: world.hardware.count()]):  # another machine may have fewer devices
        world.hardware.module.set_rng_state(state, number)


def derive(states: dict[str, Any], owner: int) -> None:
    """Seed the generators of a rank that did not save, from the states of a rank that did."""
    words = bytes(states[_TORCH].tolist()) + owner.to_bytes(8, "little")
    seed = int(digest_of_bytes(words)[:15], 16)  # 60 bits, which torch takes for a seed
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # NumPy's seed has 32 bits


def _words_state(states: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """Return the state of a Mersenne twister, Python's or NumPy's."""
    kind, words, *rest = states[key]
    if len(words) != _WORDS[key]:
        raise ValueError(f"{key} has {_WORDS[key]} words, the file {len(words)}")
    return (kind, tuple(words), *rest)


def _device_key(world: World) -> str:
    return "xm_seed" if world.device.type == "xla" else f"torch_{world.device.type}_manual_seed"


def _device_states(world: World) -> object:
    everything = getattr(module_of(world.device.type), "get_rng_state_all", None)
    return everything() if everything is not None else world.hardware.rng_state()
