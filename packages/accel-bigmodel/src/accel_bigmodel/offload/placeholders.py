"""The placeholder for an offloaded weight: empty, and it says so when somebody wants its values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import OffloadError

__all__ = ["OffloadedTensor", "forbid_gradient", "is_placeholder", "placeholder_for"]


class OffloadedTensor(torch.Tensor):
    """A tensor on the meta device that stands for a weight living elsewhere.

    Shape, dtype, and whatever else the meta device can answer are answered. An operation that needs the values, or
    that mixes it with real tensors, raises an error with the weight's name instead of computing on nothing.
    """

    weight_name: str
    block_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the empty tensor, unless it needs values that are not here."""
        kwargs = kwargs or {}
        placeholder, mixed = _look_through((args, kwargs), None, False)
        if placeholder is not None and mixed and func is not torch.Tensor.__setattr__:
            raise _used_while_offloaded(placeholder)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as failure:
            if placeholder is None or "meta" not in str(failure).lower():
                raise
            raise _used_while_offloaded(placeholder) from failure
        if placeholder is not None and type(result) is torch.Tensor and result.is_meta:
            return _mark(result.as_subclass(cls), placeholder)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedTensor:
        """Copy the placeholder with its names; ties between copies are kept by `memo`."""
        known = memo.get(id(self))
        if isinstance(known, OffloadedTensor):
            return known
        twin = _make(self, self.weight_name, self.block_name)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle shape, dtype and names."""
        return _rebuild, (
            tuple(self.shape), self.dtype, self.requires_grad, isinstance(self, nn.Parameter), dict(self.__dict__)
        )  # fmt: skip


def _look_through(value: Any, placeholder: OffloadedTensor | None, mixed: bool) -> tuple[OffloadedTensor | None, bool]:
    """Find a placeholder among the arguments, and whether real tensors are among them too."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, OffloadedTensor):
            return (value if placeholder is None else placeholder), mixed
        with torch._C.DisableTorchFunctionSubclass():
            return placeholder, mixed or (not value.is_meta and value.dim() > 0)
    if isinstance(value, (list, tuple)):
        for item in value:
            placeholder, mixed = _look_through(item, placeholder, mixed)
    elif isinstance(value, dict):
        for item in value.values():
            placeholder, mixed = _look_through(item, placeholder, mixed)
    return placeholder, mixed


def _used_while_offloaded(placeholder: OffloadedTensor) -> OffloadError:
    name = placeholder.__dict__.get("weight_name", "?")
    block = placeholder.__dict__.get("block_name", "?")
    return OffloadError(
        f"An offloaded weight was used outside the forward pass of its block. Found weight {name!r} of block "
        f"{block!r}, "
        "which is in memory only while that block runs. Call the block itself, list the class that uses its weights in "
        "`preload_module_classes`, or read the weight under `align_module_device`."
    )


def _mark(tensor: torch.Tensor, like: OffloadedTensor) -> torch.Tensor:
    tensor.__dict__["weight_name"] = like.__dict__.get("weight_name", "?")
    tensor.__dict__["block_name"] = like.__dict__.get("block_name", "?")
    return tensor


def _make(tensor: torch.Tensor, weight_name: str, block_name: str) -> OffloadedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        made: OffloadedTensor = torch.Tensor._make_subclass(OffloadedTensor, empty, tensor.requires_grad)
        made.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_backward_hooks"})
        if isinstance(tensor, nn.Parameter):
            made.__dict__["_is_param"] = True
        made.__dict__["weight_name"] = weight_name
        made.__dict__["block_name"] = block_name
    return made


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool, attributes: dict[str, Any]
) -> OffloadedTensor:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    if is_parameter:
        empty = nn.Parameter(empty, requires_grad=requires_grad)
    made = _make(empty, attributes["weight_name"], attributes["block_name"])
    made.__dict__.update(attributes)
    return made


def is_placeholder(tensor: object) -> bool:
    """Tell whether a tensor only stands for an offloaded weight.

    Args:
        tensor: Anything.

    Returns:
        True for an `OffloadedTensor`.
    """
    return isinstance(tensor, OffloadedTensor)


# Torch's dictionary by identity has no types of its own.
_placeholders: MutableMapping[torch.Tensor, OffloadedTensor] = cast(Any, WeakIdKeyDictionary)()
_watched: MutableMapping[torch.Tensor, str] = cast(Any, WeakIdKeyDictionary)()
_optimizers_are_watched = False


def placeholder_for(tensor: torch.Tensor, weight_name: str, block_name: str) -> torch.Tensor:
    """Make the empty tensor that a module shows while a weight is offloaded.

    Asked again for the same tensor, it gives the same placeholder, so that ties survive.

    Args:
        tensor: The parameter or buffer that goes away.
        weight_name: Its name for messages.
        block_name: The module that brings it back, for messages.

    Returns:
        The placeholder; a parameter when `tensor` is one.
    """
    if isinstance(tensor, OffloadedTensor):
        return tensor
    known = _placeholders.get(tensor)
    if known is not None and known.size() == tensor.size() and known.dtype == tensor.dtype:
        return known
    made = _make(tensor, weight_name, block_name)
    _placeholders[tensor] = made
    if isinstance(tensor, nn.Parameter):
        _watch_optimizers()
        _watched[tensor] = weight_name
    return made


def forget(tensor: torch.Tensor) -> None:
    """Let a tensor be trained again: it is back in its module.

    Args:
        tensor: The parameter that `placeholder_for` was asked for.
    """
    if tensor in _watched:
        del _watched[tensor]
    if tensor in _placeholders:
        del _placeholders[tensor]


def _watch_optimizers() -> None:
    """Have every optimizer step check that it trains no offloaded weight (torch's global step hook)."""
    global _optimizers_are_watched
    if not _optimizers_are_watched:
        _optimizers_are_watched = True
        register_optimizer_step_pre_hook(_refuse_offloaded)


def _refuse_offloaded(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _watched and not _placeholders:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = parameter.__dict__.get("weight_name") if is_placeholder(parameter) else _watched.get(parameter)
            if name is not None:
                raise OffloadError(
                    f"An optimizer cannot train an offloaded weight. Found {name!r} in a {type(optimizer).__name__}. "
                    "Give the optimizer parameters that stay on their device (adapters), or remove the hooks first."
                )


class _GradientRefusal:
    """Raises when a gradient reaches an offloaded weight: it would be lost with the copy on the device."""

    def __init__(self, weight_name: str) -> None:
        self.weight_name = weight_name

    def __call__(self, gradient: torch.Tensor) -> None:
        raise OffloadError(
            f"A gradient reached an offloaded weight, where it would be lost. Found a gradient for "
            f"{self.weight_name!r}. Freeze the offloaded weights with `requires_grad_(False)` and train the rest, or "
            "keep this weight on a device."
        )


def forbid_gradient(parameter: torch.Tensor, weight_name: str) -> None:
    """Make the backward pass raise when it computes a gradient for a loaded weight; passing through it is fine.

    Args:
        parameter: The weight's copy on the device.
        weight_name: Its name for the message.
    """
    cast(Any, parameter).register_hook(_GradientRefusal(weight_name))
