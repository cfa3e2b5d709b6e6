"""The position of a loader: (seed, epoch, offset), in samples over all ranks, and the way back to it.

The position names no rank, so any number of ranks can go on from it. What decides the order is kept with it: the seed
of a seedable sampler, or the states that the generators had when the order was drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accel_core.data.base import EpochState, LoaderBase, Order
from accel_core.data.samplers import EXACT_SAMPLERS, batches_from, get_sampler
from accel_core.data.shard import StepCounts

_VERSION = 1
_END: object = object()


def capture_order(loader: LoaderBase) -> Order:
    """Return the present states of the generators from which a loader's order is drawn."""
    # Samplers of other classes, and streams, may draw from the process's other generators.
    return _process_states(everything=type(get_sampler(loader)) not in EXACT_SAMPLERS) | _generator_states(loader)


def _process_states(*, everything: bool) -> Order:
    """Return the states of the generators that the process shares: torch's, and with `everything` all."""
    states: Order = {"default": torch.get_rng_state()}
    if everything:
        states["python"] = random.getstate()
        if "numpy" in sys.modules:
            name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
            states["numpy"] = (str(name), keys.tolist(), *rest)
    return states


def _set_process_states(states: Order) -> None:
    if "default" in states:
        torch.set_rng_state(states["default"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


@contextlib.contextmanager
def replay_order(loader: LoaderBase, states: Order) -> Iterator[None]:
    """Make a loader draw its order, inside the block, as it did when `states` were captured.

    The process's generators are restored after the block; those of the loader and the sampler keep the state that they
    have after drawing.
    """
    sampler = get_sampler(loader)
    own, own_loader = getattr(sampler, "generator", None), loader.generator
    before = {name: state for name, state in _process_states(everything=True).items() if name in states}
    try:
        _set_process_states(states)
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
        _set_process_states(before)
        if own is not None:
            sampler.generator = own
        loader.generator = own_loader


def _generator_states(loader: LoaderBase) -> Order:
    """Return the states of the generators that belong to a loader alone."""
    generators = {"loader": loader.generator, "sampler": _sampler_generator(loader)}
    return {name: generator.get_state() for name, generator in generators.items() if generator is not None}


def _sampler_generator(loader: LoaderBase) -> torch.Generator | None:
    generator = getattr(get_sampler(loader), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _same(one: Order, other: Order) -> bool:
    return all(
        torch.equal(state, other[name]) if isinstance(state, torch.Tensor) else state == other[name]
        for name, state in one.items()
    )


class Indices:
    """The indices that a loader reads, from the position that it has to begin at.

    torch keeps this object for as long as persistent workers live, so it asks the loader anew at every iteration.

    The states of the generators are captured here, where the order is drawn, and not where the epoch begins: before the
    draw, torch takes a seed for its workers from the same generator in some epochs (new workers) and not in others
    (`persistent_workers`), so a state from before that seed does not bring the order back in another process.
    """

    def __init__(self, loader: LoaderBase) -> None:
        self._loader = weakref.ref(loader)

    @property
    def loader(self) -> LoaderBase:
        """The loader; whoever reads these indices holds it."""
        loader = self._loader()
        assert loader is not None, "a loader that is being read is held by its reader"
        return loader

    def __iter__(self) -> Iterator[Any]:
        # torch asks twice when it starts workers and reads the second iterator alone: nothing may be drawn for the
        # first one that the sampler's own `__iter__` does not draw by itself.
        loader, epoch = self.loader, self.loader.epoch
        counts: dict[int, StepCounts] = {}
        epoch.counts = counts
        if epoch.replay is not None:
            return self._replayed(loader, epoch, counts)
        order = epoch.order = capture_order(loader)
        epoch.drawn_late = True
        indices = self._from(loader, epoch, counts)
        return indices if not _same(order, capture_order(loader)) else itertools.chain(_capture(loader, epoch), indices)

    def __len__(self) -> int:
        loader = self.loader
        return max(0, len(loader.index_base) - loader.own_skip())

    def _replayed(self, loader: LoaderBase, epoch: EpochState, counts: dict[int, StepCounts]) -> Iterator[Any]:
        """Draw the order as it was drawn before, when the first index is asked for."""
        with replay_order(loader, (epoch.replay or {})["order"] or capture_order(loader)):
            epoch.order, epoch.drawn_late = capture_order(loader), True
            indices = self._from(loader, epoch, counts)
            first = next(indices, _END)
        if first is not _END:
            yield first
            yield from indices

    def _from(self, loader: LoaderBase, epoch: EpochState, counts: dict[int, StepCounts]) -> Iterator[Any]:
        """Return the indices from the position on, or after those that are skipped; batches that are not full count."""
        base, shard, offset = loader.index_base, loader.shard, epoch.begins_at
        exact = loader.exact_batches is not None
        skip = 0 if offset else loader.own_skip()
        if skip and exact:  # all steps but the last are full, so the steps that are skipped end at a known position
            offset, skip = skip * loader.own_units(None), 0
            epoch.skipped, epoch.first_step = offset, 0
        if shard is not None:
            indices: Iterator[Any] = shard.from_offset(offset, counts)
        elif exact:
            size = base.batch_size
            if loader.local_ranks:
                offset = epoch.steps_before * size or offset // loader.local_ranks
            indices, _ = batches_from(base, offset, 0)
            full, rest = divmod(max(0, len(base.sampler) - offset), size)
            if rest and not base.drop_last:
                counts[full] = StepCounts((rest,), (rest,))
        else:
            if loader.local_ranks or loader.spec.batch_size is None or not isinstance(base, BatchSampler):
                passed = epoch.steps_before if loader.local_ranks else offset
                indices = itertools.islice(iter(base), passed, None)
            else:
                indices, _ = batches_from(base, offset, 0)
            if loader.batches_indices and loader.spec.batch_size is not None:
                indices = _counted(indices, loader.spec.batch_size, counts)
        return itertools.chain(_skip(indices, skip, loader, epoch, counts), indices) if skip else indices


def _capture(loader: LoaderBase, epoch: EpochState) -> Iterator[list[int]]:
    """Note the states of the generators when the first index is asked for, and yield nothing."""
    epoch.order = capture_order(loader)
    yield from ()


def _skip(
    indices: Iterator[Any], skip: int, loader: LoaderBase, epoch: EpochState, counts: dict[int, StepCounts]
) -> Iterator[list[int]]:
    """Pass over batches when the first index is asked for, and yield nothing."""
    for step, _ in enumerate(itertools.islice(indices, skip)):
        epoch.skipped += loader.own_units(counts.pop(step, None))
    yield from ()


def _counted(indices: Iterator[Any], size: int, counts: dict[int, StepCounts]) -> Iterator[Any]:
    """Yield batches of indices, and note by step the size of each that is not full."""
    for step, index in enumerate(indices):
        if len(index) != size:
            counts[step] = StepCounts((len(index),), (len(index),))
        yield index


class Cursor:
    """Where a prepared loader stands, for checkpoints."""

    def __init__(self, loader: LoaderBase) -> None:
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
        return "samples" if self._loader.spec.batch_size is not None else "batches"

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It is the same on every rank, and any number of ranks can load it.

        At the last batch of an epoch it is the start of the next one.
        """
        loader = self._loader
        if loader.pending is not None:
            return dict(loader.pending)
        epoch = loader.current_epoch
        over = epoch.ended and loader.is_over(self.offset)
        offset = 0 if over else self.offset
        return {
            "version": _VERSION,
            "epoch": self.epoch + over,
            "offset": offset,
            "unit": self.unit,
            "seed": getattr(get_sampler(loader), "initial_seed", None),
            "order": dict(epoch.order or {}) if offset else _generator_states(loader),
            "drawn_late": epoch.drawn_late if offset else loader.keeps_workers,
            "steps": loader.own_batches() if offset else 0,
            "readers": loader.readers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration of the loader go on from a position.

        It gives the rest of that epoch, or the next epoch where nothing is left; those after it give whole epochs.
        """
        loader = self._loader
        sampler = get_sampler(loader)
        if state["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        loader.set_epoch(int(state["epoch"]))
        loader.forget_position()
        loader._seedless = False
        if state["offset"]:
            loader.pending = dict(state)
            return
        loader.pending = None
        loader._seedless = state["drawn_late"]
        for name, generator in (("loader", loader.generator), ("sampler", _sampler_generator(loader))):
            if generator is not None and name in state["order"]:
                generator.set_state(state["order"][name])

    def rewind(self) -> None:
        """Let the next iteration begin at the start of the epoch, whatever was loaded."""
        self._loader.pending = None
        self._loader.forget_position()
