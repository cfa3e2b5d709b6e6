"""`AcceleratedOptimizer`: an optimizer that moves only where an accumulation window ends."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_core._passed import PassedOn
from accel_core.comm.tree import recursively_apply
from accel_core.errors import PreparationError
from accel_core.host import heartbeat
from accel_core.logging import get_logger
from accel_core.precision import scaler as scalers
from accel_core.state.gradient import GradientState

if TYPE_CHECKING:
    from accel_core.optim.average import ModelAverage

_logger = get_logger(__name__)


class Stepper(Protocol):
    """Steps and zeroes instead of an optimizer, for an engine that owns both; called only where a window ends."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of infinite or NaN gradients."""

    def step(self, closure: Callable[[], Any] | None) -> object:
        """Update the parameters.

        Args:
            closure: Computes the loss again, for optimizers that need it several times; else `None`.

        Returns:
            What the optimizer's own step returns.
        """

    def zero_grad(self, set_to_none: bool | None) -> None:
        """Clear the gradients; `None` leaves the way to the engine.

        Args:
            set_to_none: Drop the gradients, or fill them with zeros.
        """


def move_to_device(state: object, device: torch.device | str) -> object:
    """Move every tensor of a nest of lists, tuples and mappings to `device`."""
    moved: object = recursively_apply(torch.Tensor.to, state, device)
    return moved


def is_lomo(optimizer: object) -> bool:
    """Return whether an optimizer, or the one that it wraps, is `Lomo` or `AdaLomo` of lomo-optim."""
    library = sys.modules.get("lomo_optim")  # whoever made such an optimizer has imported it
    inner = getattr(optimizer, "optimizer", optimizer)
    return library is not None and isinstance(inner, library.Lomo | library.AdaLomo)


def lomo_backward(optimizers: list[Any], loss: torch.Tensor, learning_rate: float) -> None:
    """Run the fused backward of the LOMO optimizers among `optimizers`.

    Raises:
        PreparationError: None of them is a LOMO optimizer.
    """
    found = [optimizer.optimizer for optimizer in optimizers if is_lomo(optimizer)]
    if not found:
        raise PreparationError(
            f"lomo_backward needs a prepared LOMO optimizer; got {len(optimizers)} prepared optimizers, none of them "
            "from lomo_optim. Prepare one, or call backward()."
        )
    for optimizer in found:
        optimizer.fused_backward(loss, learning_rate)


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's `step` so that its wrapper learns whether the gradient scaler really called it."""

    def step(*args: object, **kwargs: object) -> object:
        accelerated_optimizer._accelerate_step_called = True
        # A fused optimizer is always called, and skips by what the scaler leaves here.
        accelerated_optimizer._found_inf = getattr(accelerated_optimizer.optimizer, "found_inf", None)
        return method(*args, **kwargs)

    return step


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps, and zeroes gradients, only where the accumulation window ends.

    Everything else is the wrapped optimizer's. Under fp16 it steps through the gradient scaler and says whether the
    scaler skipped the step.

    Args:
        optimizer: The optimizer to wrap.
        device_placement: Whether its state is moved to the process's device.
        scaler: The gradient scaler of fp16 training, or `None`.
        stepper: Steps and zeroes instead of the optimizer; `None` where it does so itself.
        gradient_state: Where the step stands; that of the process where `None`.

    Examples:
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.rand(2, 64)).sum())
        >>> optimizer.step()
        >>> optimizer.step_was_skipped  # by the gradient scaler of fp16
        False
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        stepper: Stepper | None = None,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.optimizer: Any = optimizer
        self._stepper = stepper
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self._updates_in_backward = is_lomo(optimizer)
        self._is_overflow = False
        self._accelerate_step_called = False
        self._found_inf: torch.Tensor | None = None
        self.averages: list[ModelAverage] = []
        self.siblings: list[AcceleratedOptimizer] = []  # which the Accelerator has prepared, this one among them

    def place(self, device: torch.device) -> None:
        """Move the optimizer's state to `device`, where it was asked to and there is any.

        Args:
            device: Where the state goes.
        """
        if self.device_placement and self.optimizer.state:
            state = self.optimizer.state_dict()
            moved: Any = move_to_device(state, device)
            # Where torch counts steps on the CPU, it would wait for each counter on a device in every step.
            for key, entries in state["state"].items():
                if isinstance(entries, Mapping) and "step" in entries:
                    moved["state"][key]["step"] = entries["step"]
            self.optimizer.load_state_dict(moved)

    state = PassedOn[defaultdict[torch.Tensor, Any]]("optimizer.state", "The wrapped optimizer's state.")
    param_groups = PassedOn[list[dict[str, Any]]]("optimizer.param_groups", "The wrapped optimizer's parameter groups.")
    defaults = PassedOn[dict[str, Any]]("optimizer.defaults", "The wrapped optimizer's defaults.")

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # while it is unpickled there is no optimizer to ask
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: As `torch.optim.Optimizer.add_param_group` takes it.
        """
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state.

        Args:
            state_dict: What `state_dict` returned.
        """
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients where the window ends; inside a window they are kept to be added to.

        Args:
            set_to_none: As in torch; `None` leaves the choice to the wrapped optimizer.
        """
        if not self.gradient_state.sync_gradients:
            return
        self.gradient_state.awaits_step = False
        if self._stepper is not None:
            self._stepper.zero_grad(set_to_none)
        elif set_to_none is None or "set_to_none" not in inspect.signature(self.optimizer.zero_grad).parameters:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(self) -> object:
        """Switch the optimizer to training; those without modes (all but schedule-free ones) have nothing to do.

        Returns:
            What the optimizer's own method returns; `None` where it has none.
        """
        if callable(getattr(self.optimizer, "train", None)):
            return self.optimizer.train()
        return None

    def eval(self) -> object:
        """Switch the optimizer to evaluation; those without modes have nothing to do.

        Returns:
            What the optimizer's own method returns; `None` where it has none.
        """
        if callable(getattr(self.optimizer, "eval", None)):
            return self.optimizer.eval()
        return None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step where the accumulation window ends; elsewhere, and where backward has updated already, do nothing.

        Args:
            closure: Passed to the wrapped optimizer, and not called inside of a window.

        Returns:
            What the wrapped optimizer returns.
        """
        heartbeat.beat()
        if not self.gradient_state.sync_gradients:
            return None
        run: Callable[..., Any] = self._step_at_end
        for extension in self.gradient_state.extensions:
            run = partial(extension.step, run, self)
        return run(closure)

    def _step_at_end(self, closure: Callable[[], Any] | None) -> object:
        self.gradient_state.awaits_step = False
        if self.gradient_state.passes >= 0:
            self._look_at_first_step(closure)
        torch.clear_autocast_cache()  # an autocast block around the loop would compute on with the weights before
        if self.averages:
            return self._step_and_average(closure)
        return None if self._updates_in_backward else self._step(closure)

    def _look_at_first_step(self, closure: object) -> None:
        """Warn of gradients that were not divided as the run's accumulation asks for."""
        state, passes = self.gradient_state, self.gradient_state.passes
        state.passes = -1
        gradients = (parameter.grad for group in self.param_groups for parameter in group["params"])
        if closure is not None or self._stepper is not None or all(each is None for each in gradients):
            return
        if not passes:
            _logger.warning(
                "accelerator.backward() divides the loss of a window and scales it for fp16; got optimizer.step() with "
                "gradients of loss.backward(). Call accelerator.backward(loss) instead."
            )
        elif passes == 1 < state.num_steps and not state.end_of_dataloader:
            _logger.warning(
                f"gradient_accumulation_steps={state.num_steps} divides each loss by {state.num_steps}; got "
                "optimizer.step() after one batch, outside of accumulate(), with that part of its gradients. Put the "
                "batch into a block: with accelerator.accumulate(model)."
            )

    def _step_and_average(self, closure: Callable[[], Any] | None) -> object:
        """Step, and let averages follow a step that was really made."""
        for average in self.averages:
            average.refuse_applied("optimizer.step()")
        result = None if self._updates_in_backward else self._step(closure)
        if not self.step_was_skipped:
            for average in self.averages:
                average.update(self.optimizer)
        return result

    def _step(self, closure: Callable[[], Any] | None) -> object:
        """Step by whatever steps this optimizer."""
        if self._stepper is not None:
            return self._stepper.step(closure)
        if self.scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        return self._scaled_step(self.scaler, closure)

    def _scaled_step(self, scaler: torch.amp.GradScaler, closure: Callable[[], Any] | None) -> object:
        """Step through the scaler, and note whether it found infinite gradients and skipped."""
        self._accelerate_step_called = False
        scalers.adapt(scaler, [self.optimizer])  # where it steps again without a backward pass of the Accelerator
        plain = self.optimizer.step  # which somebody may have exchanged
        self.optimizer.step = patch_optimizer_step(self, plain)
        try:
            result = scaler.step(self.optimizer, closure) if closure is not None else scaler.step(self.optimizer)
            scalers.adapt(scaler, [each.optimizer for each in self.siblings if each.scaler is scaler])
        finally:
            self.optimizer.step = plain
        self._is_overflow = not self._accelerate_step_called
        return result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of infinite or NaN gradients."""
        if self._stepper is not None:
            return self._stepper.step_was_skipped
        return self._is_overflow or bool(self._found_inf)  # waits for the device

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A schedule made for this wrapper puts a `step` of its own into it, which belongs to this object.
        left_out = {"_accelerate_step_called", "_found_inf", "averages", "siblings", "step"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._accelerate_step_called = False
        self._found_inf, self.averages, self.siblings = None, [], []
