"""The position of a loader: (seed, epoch, offset), in samples over all ranks.

The position names no rank, so any number of ranks can go on from it. What decides the order is kept with it: the seed
of a seedable sampler, or the states that the generators had when the epoch began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from accel_core.data.samplers import get_sampler
from accel_core.data.shard import Cut
from accel_core.errors import CheckpointMismatchError

__all__ = ["Cursor", "Positioned", "capture_order", "replay_order"]

_VERSION = 1


class Positioned(Protocol):
    """A loader that knows where it stands.

    Attributes:
        iteration (int): Number of the epoch that is being read, or comes next.
        pending (dict[str, Any] | None): A loaded position that the next iteration goes on from.
        generator (Any): What torch draws the order from.
    """

    iteration: int
    pending: dict[str, Any] | None
    generator: Any

    @property
    def cut(self) -> Cut:
        """How the data is shared out over ranks."""

    @property
    def order(self) -> dict[str, torch.Tensor]:
        """States of the generators when the epoch began."""

    def global_offset(self) -> int:
        """Return the position in the epoch, over all ranks."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""

    def forget_position(self) -> None:
        """Stand at the start of the epoch."""


def capture_order(loader: Any) -> dict[str, torch.Tensor]:
    """Return the states of the generators that a loader's order is drawn from, as they are now."""
    return {"default": torch.get_rng_state(), **_generator_states(loader)}


@contextlib.contextmanager
def replay_order(loader: Any, states: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let a loader draw its order, inside the block, as it did when `states` were captured.

    The default generator comes out as it went in; the generators of the loader and of the sampler come out as they
    were after the order was drawn.
    """
    before = torch.get_rng_state()
    sampler = get_sampler(loader)
    own, own_loader = getattr(sampler, "generator", None), loader.generator
    try:
        if "default" in states:
            torch.set_rng_state(states["default"])
        if "loader" in states:
            if own_loader is None:
                loader.generator = torch.Generator()
            loader.generator.set_state(states["loader"])
        else:
            loader.generator = None
        if "sampler" in states and hasattr(sampler, "generator"):
            if own is None:
                own = sampler.generator = torch.Generator()
            own.set_state(states["sampler"])
        elif own is not None and "default" in states:
            sampler.generator = None
        yield
    finally:
        if own is not None:
            sampler.generator = own
        loader.generator = own_loader
        torch.set_rng_state(before)


def _generator_states(loader: Any) -> dict[str, torch.Tensor]:
    """Return the states of the generators that belong to a loader alone."""
    generators = {"loader": loader.generator, "sampler": _sampler_generator(loader)}
    return {name: generator.get_state() for name, generator in generators.items() if generator is not None}


def _sampler_generator(loader: Any) -> torch.Generator | None:
    generator = getattr(get_sampler(loader), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


class Cursor:
    """Where a prepared loader stands, for checkpoints.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Positioned) -> None:
        self._loader = loader

    @property
    def epoch(self) -> int:
        """Number of the epoch that is being read, or comes next."""
        return self._loader.iteration

    @property
    def offset(self) -> int:
        """Samples of the epoch read by all ranks together; batches where they have no fixed size."""
        return self._loader.global_offset()

    @property
    def unit(self) -> str:
        """What `offset` counts: "samples" or "batches"."""
        return "samples" if self._loader.cut.batch_size is not None else "batches"

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It is the same on every rank, and any number of ranks can load it.

        Returns:
            `epoch`, `offset`, `unit` and `seed` (`None` without a seedable sampler); `order`: states of generators
            when the epoch began (as they are now between epochs), as uint8 tensors.
        """
        loader = self._loader
        if loader.pending is not None:
            return dict(loader.pending)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "offset": self.offset,
            "unit": self.unit,
            "seed": getattr(get_sampler(loader), "initial_seed", None),
            "order": dict(loader.order) if self.offset else _generator_states(loader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration of the loader go on from a position.

        It gives the rest of that epoch; the iterations after it give whole epochs.

        Args:
            state: What `state_dict` returned, on any number of ranks. Without `order`, the order is that of the loader
            as it is now: that is enough for one that depends on seed and epoch alone.

        Raises:
            CheckpointMismatchError: The position was taken from another kind of loader.
        """
        if state.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"The position of a loader has the version {state.get('version')!r}; this accel reads {_VERSION}. "
                "Load it with the version of accel-core that wrote it."
            )
        if state["offset"] and state["unit"] != self.unit:
            raise CheckpointMismatchError(
                f"The position of a loader counts {state['unit']}; this loader counts {self.unit}, because its batches "
                f"have {'a' if self.unit == 'samples' else 'no'} fixed size. Prepare the loader as it was when saved."
            )
        loader = self._loader
        sampler = get_sampler(loader)
        if state["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        loader.set_epoch(int(state["epoch"]))
        loader.forget_position()
        if state["offset"]:
            loader.pending = dict(state)
            return
        loader.pending = None
        for name, generator in (("loader", loader.generator), ("sampler", _sampler_generator(loader))):
            if generator is not None and name in state["order"]:
                generator.set_state(state["order"][name])

    def rewind(self) -> None:
        """Let the next iteration begin at the start of the epoch, whatever was loaded."""
        self._loader.pending = None
        self._loader.forget_position()
