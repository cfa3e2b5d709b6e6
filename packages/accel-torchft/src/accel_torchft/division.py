"""Which samples a replica reads: the rest of an epoch, divided anew whenever others are there than before."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import torch

from accel_core.checkpoint import rng
from accel_core.data.loader import PreparedLoader
from accel_core.data.samplers import BatchSamplerShard
from accel_core.data.shard import StepCounts
from accel_core.errors import StateError
from accel_core.runtime import Runtime
from accel_torchft.replicas import Replicas

_END = object()


class ReplicaShard(BatchSamplerShard):
    """A part of a batch sampler without the repeats that fill up its last batch.

    A batch of padding alone is kept, as all ranks make equally many steps, and is not counted.
    """

    trims: bool = True

    @classmethod
    def of(cls, shard: BatchSamplerShard) -> ReplicaShard:
        """Return one that shares out the same batches."""
        made = object.__new__(cls)
        made.__dict__.update(shard.__dict__)
        return made

    def from_offset(self, offset: int, counts: dict[int, StepCounts]) -> Iterator[list[int]]:
        """Return this rank's batches from a position on."""
        for step, batch in enumerate(super().from_offset(offset, counts)):
            real = counts[step].real[self.process_index] if step in counts else 0
            yield batch[:real] if real and self.trims else batch


class Reader:
    """Passes the batches of loaders on: those that are trained with in step with the other replicas.

    Attributes:
        positions: Where each loader stands after the last step that was made, by its number in the run.
    """

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        meet: Callable[[bool], bool],
        parameters: Callable[[], list[torch.nn.Parameter]],
    ) -> None:
        self._runtime, self._replicas, self._meet, self._parameters = runtime, replicas, meet, parameters
        self.positions: dict[int, dict[str, Any]] = {}
        self.is_open = False  # whether a step was begun
        self.is_made = True  # whether the last step was made
        self.is_fed = False  # whether a backward pass followed the last batch
        self.is_passing = False  # whether the last batch is of an epoch that is over
        self.where = 0  # position after the last step, of which replicas make sure that all have the same
        self.weight = 0.0  # samples of the step so far, on this replica
        self.share = 1.0  # what the loss of this rank counts, against those of the others of its replica
        self._reading: PreparedLoader | None = None

    def read(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches: where models train, those of this replica, until all replicas have read all; else all.

        Raises:
            StateError: Batches are read in a way in which replicas would lose some.
        """
        runtime = self._runtime
        if not torch.is_grad_enabled() or not any(model.training for model in runtime.models):
            self._divide(loader, 0, 1, trains=False)
            yield from batches
            return
        number = next((at for at, each in enumerate(runtime.dataloaders) if each is loader), None)
        if number is None:
            raise StateError(
                "Replicas know where the loaders of prepare() stand; got another one, as of skip_first_batches. Read "
                "the prepared one: after load_state it goes on where it stood."
            )
        self._parameters()  # which are checked before anything is trained
        epoch, replicas = loader.iteration, self._replicas
        if self._reading is not None:
            raise StateError(
                "One loader at a time feeds the steps of replicas; got two that are read while models train. Read the "
                "other one under torch.no_grad(), or make one loader of both."
            )
        if not replicas.is_connected and replicas.published(number) > epoch:
            replicas.skipped += 1  # the others have read it before this replica came
            yield from self._pass(loader, epoch)
            loader.set_epoch(epoch + 1)
            return
        self._reading = loader
        replicas.note()
        try:
            yield from self._train(loader, number, epoch)
        finally:
            self._reading, self.is_open = None, False
            replicas.note(trains=False)

    def _pass(self, loader: PreparedLoader, epoch: int) -> Iterator[Any]:
        """Yield one batch of an epoch that is over, for scripts that look at their last one; no step is made of it."""
        random = rng.collect(self._runtime.world)  # where a state was taken over, it goes on from here
        loader.cursor.rewind()
        loader.set_epoch(epoch)
        self._divide(loader, *self._replicas.place, trains=True)
        stream = _stream(loader)
        self.is_passing = True
        try:
            for batch in itertools.islice(stream, 1):
                loader.end_of_dataloader = True  # so that its gradients are cleared
                yield batch
        finally:
            self.is_passing = False
            stream.close()
            loader.cursor.rewind()
            rng.restore(random, self._runtime.world)

    def _train(self, loader: PreparedLoader, number: int, epoch: int) -> Iterator[Any]:
        replicas = self._replicas
        stream: Generator[Any, None, None] | None = None
        if loader.pending is None:
            loader.forget_position()  # of an iteration that was broken off, which begins anew
        if replicas.is_behind and self.positions[number]["epoch"] == epoch:
            loader.cursor.load_state_dict(self.positions[number])
        self.positions[number] = loader.cursor.state_dict()
        self.is_open = False
        while True:
            if not self.is_open:
                if stream is not None and self.is_made:
                    self.positions[number] = loader.cursor.state_dict()
                place = replicas.place
                over = self.positions[number]["epoch"] > epoch
                if not self._meet(over):
                    break
                position = self.positions[number]
                if position["epoch"] > epoch:
                    if stream is not None and not over:  # the others read on without this replica
                        stream.close()
                    if replicas.close(self._parameters()):
                        break
                    continue
                if stream is None or not self.is_made or replicas.healed or place != replicas.place:
                    if stream is not None:
                        stream.close()
                    self._divide(loader, *replicas.place, trains=True)
                    loader.cursor.load_state_dict(position)
                    stream = _stream(loader)
                    replicas.publish({at: each["epoch"] for at, each in self.positions.items()})
                self.is_open, self.is_made, self.is_fed, self.weight = True, False, True, 0.0
                self.where = number << 56 | (position["epoch"] & 0xFFFF) << 40 | position["offset"] & (1 << 40) - 1
            elif not self.is_fed:
                raise StateError(
                    "A batch that is read while models train is trained with; got a second one without a backward pass "
                    "of the first. Call model.eval() to evaluate, or accelerator.backward for every batch."
                )
            assert stream is not None, "a step that is open has a stream"
            batch = next(stream, _END)
            if batch is _END:
                if self.weight:
                    raise StateError(
                        "An epoch ends with a step of a prepared optimizer; got batches without one. Pass the "
                        "optimizer to prepare(), and call its step() after each backward pass."
                    )
                self.is_open, self.is_made = False, True
                continue
            self._count(loader)
            self.is_fed = False
            yield batch
        if stream is None:
            yield from self._pass(loader, epoch)
        self._finish(loader, stream, epoch, self.positions[number])

    def commit(self) -> bool:
        """Return whether the step is made, and end it."""
        if self.is_passing:
            return False
        made = self._replicas.commit()
        if self._replicas.is_decided:
            self.is_open, self.is_made = False, made
        return bool(made)

    def _finish(
        self, loader: PreparedLoader, stream: Iterator[Any] | None, epoch: int, position: dict[str, Any]
    ) -> None:
        """Leave a loader where the next epoch begins."""
        for _ in stream or ():
            raise AssertionError("a position after the epoch has no batch before it")
        if loader.iteration == epoch + 1 and loader.pending is None:
            return
        if position["epoch"] == epoch + 1:
            loader.cursor.load_state_dict(position)
        else:
            loader.cursor.rewind()
            loader.set_epoch(epoch + 1)

    def _divide(self, loader: PreparedLoader, place: int, count: int, *, trains: bool) -> None:
        """Give each rank of this replica its part of the data, or of all of it where the replica reads alone."""
        shard, layout = loader.shard, self._runtime.layout
        if not isinstance(shard, ReplicaShard):
            return
        shard.num_processes, shard.process_index = count * layout.replicas, place * layout.replicas + layout.part
        shard.trims, shard.even_batches = trains, trains or (self._runtime.data.even_batches and layout.replicas > 1)
        parts = tuple(place * layout.replicas + part for part in layout.parts)
        loader.settings = dataclasses.replace(loader.settings, parts=parts)

    def _count(self, loader: PreparedLoader) -> None:
        """Note how many samples this replica reads in a batch, and which share of them is this rank's."""
        counts, spec, layout = loader.counts, loader.spec, self._runtime.layout
        if counts is None:
            self.weight += (spec.step_samples or spec.ranks) // spec.ranks * layout.replicas
            self.share = 1.0
            return
        first = spec.rank - layout.part
        real = counts.real[first : first + layout.replicas]
        self.weight += sum(real)
        self.share = real[layout.part] * layout.replicas / sum(real) if sum(real) else 0.0


def _stream(loader: PreparedLoader) -> Generator[Any, None, None]:
    """Begin an iteration of a loader, which can be closed."""
    return cast("Generator[Any, None, None]", loader._read())
