"""`AcceleratedScheduler`: a learning-rate schedule that moves when its optimizers moved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from accel_core.process import world
from accel_core.state.gradient import GradientState

_logger = logging.getLogger(__name__)


class AcceleratedScheduler:
    """A schedule that steps when its optimizers stepped.

    A schedule is usually written for one process. Its batches are spread over N processes, so by default it moves N
    times for each optimizer step and ends at the same sample as with one process. A schedule that counts optimizer
    steps itself needs `step_scheduler_with_optimizer=False` or `split_batches=True`; at its first step the log says at
    which optimizer step a schedule with a known length will end. After the end of one with `total_steps` it stays. A
    schedule that is given a metric or an epoch moves once for it.

    Args:
        scheduler: The schedule to wrap.
        optimizers: The optimizer, or optimizers, that it belongs to.
        step_with_optimizer: Move only when the optimizers moved.
        split_batches: Batches are split between processes, so the schedule moves once for each optimizer step.
        replicas: Number of processes that read different data; all processes where `None`.
        gradient_state: Where the step stands; that of the process where `None`.

    Examples:
        >>> optimizer, schedule = accelerator.prepare(optimizer, schedule)
        >>> optimizer.step()
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.1]
    """

    def __init__(
        self,
        scheduler: object,
        optimizers: object,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        replicas: int | None = None,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.scheduler: Any = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self._replicas = replicas
        self._begun = False
        # A schedule of the user's own may name its end and count no steps: it knows itself what follows its end.
        self._has_end = getattr(scheduler, "total_steps", None) is not None and hasattr(scheduler, "_step_count")

    def __repr__(self) -> str:
        rates = [group.get("lr") for optimizer in self.optimizers for group in optimizer.param_groups]
        when = "when its optimizers step" if self.step_with_optimizer else "at each call"
        return f"AcceleratedScheduler({type(self.scheduler).__name__}, lr={rates}, steps {when})"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule as far as the optimizers moved.

        Args:
            *args: Passed to the wrapped schedule.
            **kwargs: Passed to the wrapped schedule.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if not self._begun:
            self._begin()
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        # What it is given, such as a metric, it gets once: several times, the same metric would be no improvement.
        times = 1 if any(each is not None for each in (*args, *kwargs.values())) else self._times
        for _ in range(times):
            # OneCycleLR raises after its end; rounding up the steps of an epoch can lead there.
            if not self._has_end or self.scheduler._step_count <= self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    @property
    def _times(self) -> int:
        """Number of moves for each optimizer step; verify-parallel's run on one process has a number of its own."""
        return 1 if self.split_batches else self._replicas or world.ensure().size

    def _begin(self) -> None:
        """Find the schedule's own optimizer among those prepared by now.

        A wrapper around an optimizer shares its parameter groups, which are what a schedule writes to.
        """
        self._begun = True
        own = getattr(self.scheduler, "optimizer", None)
        groups = {id(group) for group in getattr(own, "param_groups", ())}
        moved = [each for each in self.optimizers if not groups.isdisjoint(map(id, each.param_groups))]
        self.optimizers = moved or self.optimizers
        if groups and not moved and world.ensure().is_main:
            _logger.warning(
                "The schedule %s sets the learning rate of an optimizer that was not prepared (%s); the prepared "
                "optimizers keep theirs. Pass that optimizer to prepare(), or make the schedule from one of them.",
                *(type(self.scheduler).__name__, type(own).__name__),
            )

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one a parameter group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[float]:
        """Return what the wrapped schedule computes now."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: object, **kwargs: object) -> None:
        """Print the learning rate, through the wrapped schedule.

        Args:
            *args: Arguments of the wrapped schedule's `print_lr`.
            **kwargs: The same, by name.
        """
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped schedule's state."""
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state_dict: object) -> None:
        """Load the wrapped schedule's state.

        Args:
            state_dict: What `state_dict` returned.
        """
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):  # while it is unpickled there is no schedule to ask
            raise AttributeError(name)
        return getattr(self.scheduler, name)
