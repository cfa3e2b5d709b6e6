"""What becomes of calls of torch in a context block: attention goes over all ranks, what would go wrong is refused."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, get_overridable_functions

from accel_core.errors import EngineUnavailableError
from accel_parallel.context.attention import Attention, sdpa

_R = TypeVar("_R")
_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

_KERNEL = re.compile(r"(?i)^(?!.*backward).*att(n|ention)")
"""Names of operators that compute attention forward: torch's of variable lengths, and those of other libraries."""

_Function = Callable[..., Any]


def _refuse(what: str, instead: str) -> NoReturn:
    raise EngineUnavailableError(
        f"A context-parallel block splits the sequence over ranks, and only scaled_dot_product_attention sees all of "
        f"it; got {what}, which would see this rank's part. {instead}"
    )


def uncompiled(function: Callable[..., _R]) -> Callable[..., _R]:
    """Return a function that compiled code calls without tracing it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled then, and loading it takes seconds
        return function
    found: Callable[..., _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


def _with_own_name(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function in which torch finds its own attention by name, as its causal biases look for it."""

    def attended(*args: object, **kwargs: object) -> torch.Tensor:
        before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, sdpa
        try:
            return attend(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = before

    return attended


class _Interception(TorchFunctionMode):
    """Sends every `scaled_dot_product_attention` elsewhere, by whatever name it is called."""

    def __init__(self, attend: Callable[..., torch.Tensor], handlers: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._attend = uncompiled(_with_own_name(attend))
        self._attending = False
        own: dict[Any, Callable[..., Any]] = {sdpa: self._attention, torch.Tensor.backward: self._backward}
        self._handlers = own | handlers

    def __torch_function__(
        self, func: _Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Handle one call of torch."""
        handler = self._handlers.get(func)
        if handler is None:
            if not self._attending and type(func).__module__ == "torch._ops" and _KERNEL.search(str(func)):
                _refuse(f"the kernel {func}", "Use scaled_dot_product_attention, with a mask of the whole sequence.")
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Intercept calls in the block."""
        get_overridable_functions()  # torch looks them up once, by name, and would find what stands here in the block
        # While a function of Python in torch runs (multi-head attention), no mode is active: exchange it where it looks
        # too.
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = partial(self._attention, sdpa)
        try:
            with self:
                yield
        finally:
            F.scaled_dot_product_attention = before

    def _attention(self, func: _Function, *args: object, **kwargs: object) -> torch.Tensor:
        if self._attending:
            found: torch.Tensor = func(*args, **kwargs)
            return found
        self._attending = True
        try:
            return self._attend(*args, **kwargs)
        finally:
            self._attending = False

    def _backward(self, func: _Function, tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Stay active in a backward pass, which computes forward what activation checkpointing did not keep."""
        given = inspect.signature(func).bind(tensor, *args, **kwargs).arguments
        given.pop("self")
        with self:
            torch.autograd.backward(tensor, given.pop("gradient", None), **given)


def attending(attention: Attention) -> AbstractContextManager[None]:
    """Return a context in which attention goes over all ranks."""
    # Functions that mix positions otherwise are refused where they can be told from those that do not.
    own = attention.share.local_length

    def multi_head_attention(func: _Function, *args: object, **kwargs: object) -> object:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        if given.get("need_weights", True):  # torch computes them by itself then
            _refuse("nn.MultiheadAttention with need_weights=True", "Pass need_weights=False.")
        return func(*args, **kwargs)

    def softmax(func: _Function, given: torch.Tensor, *args: object, **kwargs: object) -> object:
        if given.dim() > 3 and tuple(given.shape[-2:]) == (own, own):  # scores by query and key, of one rank's tokens
            _refuse(
                f"a softmax over scores of shape {tuple(given.shape)}",
                'Choose the implementation "sdpa" of the model\'s attention.',
            )
        return func(given, *args, **kwargs)

    def convolution(
        func: _Function, given: torch.Tensor, weight: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        if weight.shape[-1] > 1 and given.shape[-1] == own:  # a kernel of one position mixes none
            _refuse("a convolution along the sequence", "Train this model without context parallel.")
        return func(given, weight, *args, **kwargs)

    def recurrence(func: _Function, given: torch.Tensor, *args: object, **kwargs: object) -> object:
        if own in given.shape[:2]:  # batch or tokens may come first
            _refuse("a recurrent layer", "Train this model without context parallel.")
        return func(given, *args, **kwargs)

    return _Interception(
        attention,
        {
            F.multi_head_attention_forward: multi_head_attention,
            torch.conv1d: convolution,
            **dict.fromkeys(_SOFTMAX, softmax),
            **dict.fromkeys(_RECURRENT, recurrence),
        },
    ).active()


def refusing_recomputation() -> AbstractContextManager[None]:
    """Return the context of a backward pass that must not compute attention again: its block has ended."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise EngineUnavailableError(
            "Activation checkpointing computes attention again, in a context-parallel block only; got a backward pass "
            "after the block. Call accelerator.backward(loss) inside it."
        )

    return _Interception(refuse, {}).active()
