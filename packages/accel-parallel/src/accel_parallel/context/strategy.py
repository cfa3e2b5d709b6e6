"""The part of a strategy whose ranks may share the sequences of a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

from accel_core.modules.compilation import is_compiled_module
from accel_core.options.enums import DynamoBackend
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import SequenceBuffers
from accel_core.strategies.strategy import Strategy

if TYPE_CHECKING:
    from accel_parallel.context.parallel import ContextParallel

_T = TypeVar("_T")


class SequenceStrategy(Strategy):
    """Mixin: context parallelism for a strategy."""

    context: ContextParallel | None = None
    """What splits them; `None` where each rank has whole ones."""

    def check(self, bundle: Bundle) -> None:
        """Also refuse a model whose attention would not go over all ranks."""
        super().check(bundle)
        if self.context is not None:
            for slot in bundle.models:
                self.context.check(slot.given)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients in the context that belongs to the forward pass."""
        with nullcontext() if self.context is None else self.context.around_backward():
            super().backward(loss, **kwargs)

    def split_context(self, given: SequenceBuffers) -> AbstractContextManager[None]:
        """Return a context that splits tensors along their sequence dims; see `Strategy.split_context`."""
        return super().split_context(given) if self.context is None else self.context.split(given)

    def whole_metrics(self, value: _T) -> _T:
        """Return metrics of whole samples; see `Strategy.whole_metrics`."""
        return value if self.context is None else self.context.whole_metrics(value)

    def _own(self, model: torch.nn.Module) -> None:
        super()._own(model)
        if self.context is not None:
            compiled = is_compiled_module(model) or self.parts.compilation.backend != DynamoBackend.NO
            self.context.watch(self._bare(model), compiled=compiled)
