"""What a script passes where the DeepSpeed configuration defines the optimizer or the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT


class DummyOptim:
    """Takes the place of the optimizer that the DeepSpeed configuration defines.

    Examples:
        >>> optimizer = DummyOptim(model.parameters(), lr=1e-4)  # the configuration has an `optimizer`
    """

    def __init__(self, params: ParamsT, lr: float = 0.001, weight_decay: float = 0, **kwargs: object) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Takes the place of the schedule that the DeepSpeed configuration defines.

    Examples:
        >>> from accel import DummyOptim
        >>> optimizer = DummyOptim(model.parameters(), lr=1e-4)
        >>> schedule = DummyScheduler(optimizer, total_num_steps=1000, warmup_num_steps=100)
    """

    def __init__(
        self,
        optimizer: Optimizer | DummyOptim,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: object,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
