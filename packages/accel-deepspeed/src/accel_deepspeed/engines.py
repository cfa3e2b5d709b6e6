"""One engine with its accumulation window, and the wrappers for its optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_core.errors import ConfigurationError
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.state.gradient import GradientState
from accel_deepspeed.gradients import gradients_of

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Engine:
    """A DeepSpeed engine and the state of its accumulation window; it also steps its optimizer.

    Attributes:
        held: Whether backward passes leave the window open, even where the run would end it.
        parameters: The ids of the parameters that it trains.
        is_complete: Whether the gradients of a window are complete and no step has used them yet.
        step_was_skipped: Whether the last step was skipped because of infinite or NaN gradients.
    """

    def __init__(self, deepspeed: DeepSpeedEngine, parameters: frozenset[int]) -> None:
        self.deepspeed = deepspeed
        self.gradients = gradients_of(deepspeed)
        self.held = False
        self.parameters = parameters
        self.is_complete = False
        self.step_was_skipped = False
        self._norm: float | None = None  # of the gradients that the next step uses, if clipping computed it

    def backward(self, loss: torch.Tensor, *, ends_window: bool, **kwargs: object) -> None:
        """Compute gradients, and synchronize them at the end of the window."""
        earlier: list[torch.Tensor] = []
        if self.is_complete:  # a second loss of the same batch: DeepSpeed would forget the first one's gradients
            earlier = [part.clone() for part in self.gradients.parts()]
            self.gradients.clear()
        # DeepSpeed clears this flag at the next forward pass only, and would lose one of two backward passes after it.
        if hasattr(self.deepspeed.optimizer, "clear_backward_seen_flag"):  # not an optimizer of stage 0
            self.deepspeed.optimizer.clear_backward_seen_flag()
        self.deepspeed.set_gradient_accumulation_boundary(ends_window)
        self.deepspeed.backward(loss, scale_wrt_gas=False, **kwargs)  # the strategy has divided the loss
        self.is_complete = ends_window
        self._norm = None
        if earlier:
            self.gradients.add(earlier)

    def clip(self, factor: float, norm: float) -> None:
        """Scale the gradients, and report their norm before scaling as that of the step."""
        if factor < 1:
            self.gradients.scale(factor)
        self._norm = norm if math.isfinite(norm) else None  # a step finds an overflow by the norm
        self.deepspeed._global_grad_norm = norm  # what get_global_grad_norm reports

    def step(self, closure: Callable[[], Any] | None) -> None:
        """Update the parameters, and step a schedule that DeepSpeed runs; without complete gradients, do nothing."""
        if closure is not None:
            raise ConfigurationError(
                "A DeepSpeed optimizer does not take a closure; got one. Compute the loss before step()."
            )
        if not self.is_complete:  # the window is open: more gradients come
            return
        self.deepspeed.set_gradient_accumulation_boundary(True)  # a later forward pass may have cleared it
        self.gradients.step(norm_is_known=self._norm is not None)
        if self._norm is not None:
            self.deepspeed._global_grad_norm = self._norm
        self.is_complete = False
        self.step_was_skipped = not self.deepspeed.was_step_applied()

    def zero_grad(self, set_to_none: bool | None) -> None:
        """Drop complete gradients; those of an open window stay, and a step leaves none."""
        if self.is_complete:
            self.gradients.clear()
            self.is_complete = False


class _SteppedElsewhere:
    """Leaves `step` and `zero_grad` to the code that drives the engine."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine skipped its last step because of infinite or NaN gradients."""
        return bool(getattr(self._optimizer, "overflow", False))  # set by optimizers with a loss scaler

    def step(self, closure: Callable[[], Any] | None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool | None) -> None:
        """Do nothing."""


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine: it steps the engine at the end of the window."""

    def __init__(
        self, optimizer: Any, engine: Engine | None = None, gradient_state: GradientState | None = None
    ) -> None:
        stepper = _SteppedElsewhere(optimizer) if engine is None else engine
        super().__init__(optimizer, device_placement=False, scaler=None, stepper=stepper, gradient_state=gradient_state)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that DeepSpeed steps itself."""

    def __init__(self, scheduler: object, optimizers: object) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:
        """Do nothing: the engine stepped the schedule together with the optimizer."""


class DeepSpeedEngineWrapper:
    """Computes gradients through an engine, for code that expects one on the Accelerator."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: object) -> None:
        """Compute gradients, and step where the window ends."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step; `None` before the first."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm
