"""The accumulation window: which batches make one optimizer step, and what each loss is divided by."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_core.process.world import World
from accel_core.state.gradient import GradientState

__all__ = ["Accumulation"]


class Accumulation:
    """Counts batches into windows and says which of them synchronises gradients.

    A window has `num_steps` batches; the end of the training data cuts it short. The loss of each batch is divided by
    the length that its window really has, which is known ahead for data with a length, so a short last window gives
    the mean of its own batches. (Where the data has no length, the divisor is `num_steps`.)

    Args:
        gradient_state: Where the step's facts are shown to users.

    Attributes:
        step: Number of batches since the last end of the data.
        models: The models that the current batch trains; empty for all.
    """

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state = gradient_state
        self.step = 0
        self.models: tuple[torch.nn.Module, ...] = ()
        self._window: int | None = None
        self._weight: torch.Tensor | None = None

    @property
    def weighted(self) -> bool:
        """Whether batches of the open window brought weights."""
        return self._weight is not None

    def advance(self) -> bool:
        """Count one batch; set and return whether it synchronises gradients."""
        state = self.gradient_state
        num_steps = state.num_steps
        loader = state.training_dataloader() if state.sync_with_dataloader else None
        if self._window is None or self.step % num_steps == 0:
            left = None if loader is None else state.batches_left(loader)
            self._window = num_steps if left is None else max(1, min(num_steps, left + 1))
        if loader is not None and loader.end_of_dataloader:
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % num_steps == 0
        state._set_sync_gradients(sync)
        return sync

    @property
    def divisor(self) -> int:
        """What the loss of the current batch is divided by."""
        return self.gradient_state.num_steps if self._window is None else self._window

    def add_weight(self, weight: torch.Tensor | float, device: torch.device) -> None:
        """Add the weight of one batch (such as its number of tokens) to the window's."""
        value = torch.as_tensor(weight, dtype=torch.float64, device=device if device.type != "mps" else "cpu")
        self._weight = value if self._weight is None else self._weight + value

    def close_weighted(self, parameters: list[torch.nn.Parameter], world: World) -> None:
        """Make the gradients of a window of summed losses those of its weighted mean over all ranks.

        Each rank's backward added up gradients of sums, and synchronising took their mean over ranks. Multiplying by
        (number of ranks ÷ total weight) leaves the gradient of (sum of all losses ÷ sum of all weights). A window
        without any weight leaves zero gradients.

        Args:
            parameters: The parameters whose gradients are complete on every rank.
            world: The processes.
        """
        if self._weight is None:
            return
        total = self._weight
        self._weight = None
        if world.size > 1:
            total = total.to(world.device)
            dist.all_reduce(total)
        amount = float(total)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, world.size / amount if amount else 0.0)

    def restart(self) -> None:
        """Forget the current window."""
        self.step = 0
        self.models = ()
        self._window = None
        self._weight = None
