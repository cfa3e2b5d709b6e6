"""The accumulation window: which batches make one optimizer step, and what each loss is divided by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from accel_core.comm.collectives import reduce
from accel_core.errors import ConfigurationError
from accel_core.process.world import World
from accel_core.state.gradient import GradientState


class Accumulation:
    """Counts batches into windows and says which of them synchronizes gradients.

    A window has `num_steps` batches; the end of the training data cuts it short. With `short_window="actual"`, the loss
    of each batch is divided by the length that its window really has, which is known ahead for data with a length, so a
    short last window gives the mean of its own batches. With "full", and where the data has no length, the divisor is
    `num_steps`.

    Attributes:
        step: Number of batches since the last end of the data.
        num_steps: Batches of a full window, as they were when the last one was counted.
        models: The models that the current batch trains; empty for all.
        amount: Total weight of the last window whose losses had weights, over all ranks.
        is_closed: Whether the gradients of such a window were completed in the current batch.
        is_open: Whether the block of a batch of several is open.
    """

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state = gradient_state
        self.step = 0
        self.models: tuple[torch.nn.Module, ...] = ()
        self._window: int | None = None
        self.num_steps = 1
        self._weight: torch.Tensor | None = None
        self.amount = 0.0
        self.is_closed = False
        self.is_open = False

    def advance(self) -> bool:
        """Count one batch, and decide whether it synchronizes gradients."""
        state = self.gradient_state
        num_steps = state.num_steps
        loader = state.training_dataloader()
        if num_steps == 1:  # every batch is a window: nothing cuts it short
            self._window = 1
        elif self._window is None or self.step % num_steps == 0 or num_steps != self.num_steps:
            self._window = self._length(num_steps, loader)
        self.num_steps = num_steps
        if loader is not None and loader.end_of_dataloader and state.sync_with_dataloader:
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % num_steps == 0
        state.sync_gradients = sync
        self.is_closed = state.awaits_step = False
        return sync

    def _length(self, num_steps: int, loader: Any) -> int:
        """Return how many batches the window that begins now has."""
        state = self.gradient_state
        if state.short_window != "actual":
            return num_steps
        # Where `num_steps` was changed between windows, the first one ends at a multiple of the new number.
        early = self.step % num_steps if self._window is not None and self.step % self.num_steps == 0 else 0
        left = state.batches_left(loader) if loader is not None and state.sync_with_dataloader else None
        return num_steps - early if left is None else min(num_steps - early, left + 1)

    @property
    def divisor(self) -> int:
        """What the loss of the current batch is divided by."""
        return self.gradient_state.num_steps if self._window is None else self._window

    @property
    def ends_several(self) -> bool:
        """Whether the batch whose block is open ends a window of several."""
        longer = self.is_open and self._window is not None and self._window > 1
        return longer and self.gradient_state.sync_gradients

    @property
    def is_weighted(self) -> bool:
        """Whether the losses of the current window have weights."""
        return self._weight is not None

    def share_of(self, loss: torch.Tensor, weight: torch.Tensor | float | None, divide: bool = True) -> torch.Tensor:
        """Return what the current batch's loss counts in its window.

        Raises:
            ConfigurationError: Earlier batches of the window had a weight and this one has none.
        """
        if weight is not None:
            device = loss.device if loss.device.type != "mps" else "cpu"  # which has no doubles
            # A number is filled in on the device: copied there, it would wait for the forward pass.
            value = (
                weight.to(device, torch.float64)
                if isinstance(weight, torch.Tensor)
                else torch.full((), float(weight), dtype=torch.float64, device=device)
            )
            self._weight = value if self._weight is None else self._weight + value
            return loss
        if self._weight is not None:
            raise ConfigurationError(
                "Every batch of an accumulation window has a weight, or none has; got one without after others with. "
                "Pass backward(loss, weight=...) for every batch of the window."
            )
        if not divide or self._window == 1:
            return loss
        divisor = self.divisor
        return loss if divisor == 1 else loss / divisor

    def close_weighted(self, world: World) -> float | None:
        """Return what the gradients of a window of summed losses are multiplied by, or `None` without weights."""
        if self._weight is None:
            return None
        total = self._weight
        self._weight, self.is_closed = None, True
        # Each rank's backward added up gradients of sums, and synchronizing took their mean over ranks. Multiplying by
        # (number of ranks ÷ total weight) leaves the gradient of (sum of all losses ÷ sum of all weights). Where
        # several ranks are one replica, each counts its data's weight and its mean gradient as often, so the quotient
        # is the same. A window without any weight leaves zero gradients.
        self.amount = float(reduce(total.to(world.device), "sum") if world.size > 1 else total)
        return world.size / self.amount if self.amount else 0.0

    def restart(self) -> None:
        """Forget the current window."""
        self.step = 0
        self.models = ()
        self._window = None
        self._weight = None


class Batch:
    """The block of one batch: counts it, and leaves gradients unsynchronized unless its window ends."""

    __slots__ = ("_accumulation", "_entered", "_models", "_no_sync")

    def __init__(
        self,
        accumulation: Accumulation,
        models: tuple[torch.nn.Module, ...],
        no_sync: Callable[[torch.nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._no_sync = no_sync
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        accumulation = self._accumulation
        sync = accumulation.advance()
        accumulation.models = self._models
        if accumulation.num_steps > 1:
            accumulation.is_open = True
        if sync or accumulation.gradient_state.sync_each_batch:
            return
        for model in self._models:
            context = self._no_sync(model)
            context.__enter__()
            self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulation.is_open = False
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)
