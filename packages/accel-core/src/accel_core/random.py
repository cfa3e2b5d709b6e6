"""Seeds, and generators that all ranks have in the same state."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_core.comm import collectives
from accel_core.devices import registry
from accel_core.errors import ConfigurationError, expect
from accel_core.options.enums import RNGType
from accel_core.process import rendezvous
from accel_core.process.world import current, ensure
from accel_core.state.run import loss_part

_NUMPY_SEEDS = 2**32


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's (where it is installed) and torch's generators, on all devices.

    Args:
        seed: The seed.
        device_specific: Add the number of the part of the loss that this process computes, so that processes with other
            data, or other tokens of it (context parallel), draw other numbers, and those that split a model's products
            (tensor parallel) draw the same. The part is known once an Accelerator was made; before, the rank is added.
        deterministic: Make torch use algorithms that give the same result each time, and raise where it has none.

    Raises:
        UnsupportedTypeError: The seed is not a whole number.

    Examples:
        >>> set_seed(0)
        >>> first = torch.rand(2)
        >>> set_seed(0)
        >>> bool((first == torch.rand(2)).all())
        True
    """
    expect(hasattr(seed, "__index__"), seed, "A seed is a whole number", "Write it as one: set_seed(42).")
    if device_specific:
        world = current()
        # Ranks that compute one loss together have to draw the same numbers.
        seed += rendezvous.locate().rank if world is None else loss_part(world)
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
    world = current()
    if world is not None and world.device.type == "xla":
        world.hardware.set_rng_state(torch.tensor(seed))
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that one generator has on rank 0.

    Args:
        rng_type: Which generator: torch's own on the CPU, that of a kind of device, or `generator`.
        generator: The generator, for `RNGType.GENERATOR`.

    Raises:
        ConfigurationError: `RNGType.GENERATOR` without a generator.
        DeviceUnavailableError: The installed torch does not drive that kind of device.

    Examples:
        >>> from accel import RNGType
        >>> generator = torch.Generator()
        >>> synchronize_rng_state(RNGType.GENERATOR, generator)
        >>> order = torch.randperm(10, generator=generator)  # the same on every process
    """
    if rng_type is not None:
        synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(rng_types: Sequence[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Give every rank the states that several generators have on rank 0, in one operation.

    Args:
        rng_types: Which generators, as members of RNGType or their values.
        generator: The generator, for `"generator"`.

    Raises:
        ConfigurationError: A word names no generator, or `"generator"` comes without one.
        DeviceUnavailableError: The installed torch does not drive a kind of device that is named.

    Examples:
        >>> synchronize_rng_states(["torch", "generator"], torch.Generator())
    """
    access = [_access(RNGType(rng_type), generator) for rng_type in rng_types]
    # Read on one process too, where a wrong kind is as wrong as on several.
    states = [read() for read, _ in access]
    if ensure().size == 1:
        return
    collectives.broadcast(states, from_process=0)
    for (_, write), state in zip(access, states, strict=True):
        write(state)


def _access(kind: RNGType, generator: torch.Generator | None) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads the state of a generator, and what writes it."""
    if kind is RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind is not RNGType.GENERATOR:
        device = registry.named(kind.value)
        return device.rng_state, device.set_rng_state
    if generator is None:
        raise ConfigurationError(
            "The state of a generator of your own cannot be synchronized without it; got generator=None. "
            "Pass generator=..., or leave 'generator' out of rng_types."
        )
    return generator.get_state, generator.set_state
