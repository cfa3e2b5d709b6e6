"""Wrappers for the optimizer and schedule of an engine, which steps both itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer


class _Chain:
    """Several megatron-core optimizers as one, without an attribute `optimizer`: accessing it there raises."""

    def __init__(self, chain: ChainedOptimizer) -> None:
        self.chained_optimizers = chain.chained_optimizers
        self._chain = chain

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_chain"):
            raise AttributeError(name)
        return getattr(self._chain, name)


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine, which steps when the model is called."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        inner: Any = _Chain(optimizer) if len(optimizer.chained_optimizers) > 1 else optimizer
        super().__init__(inner, device_placement=False, scaler=None)
        self.skipped = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of infinite or NaN gradients."""
        return self.skipped

    def step(self) -> None:  # type: ignore[override]
        """Do nothing: the engine stepped when the model was called."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients before it computes new ones."""


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule that the engine steps itself."""

    def __init__(self, scheduler: object, optimizers: object) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the engine stepped the schedule when the model was called."""

    def load_state_dict(self, state_dict: object) -> None:
        """Continue from a saved schedule."""
        self.scheduler.num_steps = 0  # megatron-core adds the saved count to this
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]
