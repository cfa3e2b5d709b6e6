"""Local SGD: processes train on their own for a few steps, then average their weights."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from accel_core.comm.objects import gather_object
from accel_core.errors import EngineUnavailableError


class LocalSGD:
    """A context in which gradients are not synchronized and weights are averaged every few optimizer steps.

    Every process has to make the same number of steps. With one process nothing happens. (Stich, "Local SGD converges
    fast and communicates little", 2018.)

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model, trained by data parallelism.
        local_sgd_steps: Number of optimizer steps between two averages.
        enabled: Whether to do anything.

    Raises:
        EngineUnavailableError: The model's weights are sharded over processes, so that none has its own to train.

    Examples:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local:
        ...     for images, labels in loader:
        ...         accelerator.backward(cross_entropy(model(images), labels))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local.step()
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        if self.enabled and not accelerator._runtime.strategy.holds_whole(model):
            raise EngineUnavailableError(
                f"Local SGD needs a whole model in each process; got {type(model).__name__} under "
                f"{accelerator.distributed_type}. Prepare the model for plain data parallelism, or pass enabled=False."
            )

    def __enter__(self) -> LocalSGD:
        """Stop synchronizing gradients."""
        if self.enabled:
            self._unsynchronized = self.accelerator.no_sync(self.model)
            self._unsynchronized.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Average the weights, unless the block failed, and synchronize gradients again."""
        if not self.enabled:
            return
        self._unsynchronized.__exit__(kind, error, trace)
        if error is None:
            self._average()
            self._agree_on_scale()

    def step(self) -> None:
        """Count one optimizer step, and average the weights where a round ends; call it after `optimizer.step()`."""
        if not self.enabled:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Replace every parameter by its mean over the processes, in one operation."""
        parameters = list(self.model.parameters())
        means = self.accelerator.reduce([parameter.detach() for parameter in parameters], reduction="mean")
        with torch.no_grad():
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean)
        torch.clear_autocast_cache()  # of a block around this one

    def _agree_on_scale(self) -> None:
        """Scale losses alike again: of fp16, each process adapted its scale to its own gradients."""
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(min(gather_object([scaler.state_dict()]), key=lambda state: state["scale"]))
