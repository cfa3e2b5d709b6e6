"""The placeholder for an offloaded weight: it is empty, and raises when its values are needed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from accel_bigmodel._torch import DisableTorchFunctionSubclass, make_subclass, tree_leaves
from accel_bigmodel.meta import own_attributes
from accel_core.errors import OffloadError

__all__ = ["OffloadedTensor", "forbid_gradient", "is_placeholder", "placeholder_for"]


_DUNDER_WRITES = frozenset({
    "__setitem__", "__delitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip
# They change what the placeholder says about the weight, which counts when the weight is loaded.
# Python creates these at every look-up, so they are compared by equality.
_SET_FLAG = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_HARMLESS = frozenset({torch.Tensor.requires_grad_, torch.Tensor.detach_})
# What they return has the weight's values, at most in another dtype: it can stand for the weight.
_KEEP_VALUES = frozenset({
    torch.Tensor.data.__get__, torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.to,  # type: ignore[attr-defined]
    torch.Tensor.half, torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.type,
    torch.Tensor.requires_grad_, torch.detach, torch.clone,
})  # fmt: skip


class OffloadedTensor(torch.Tensor):
    """A tensor on the meta device that stands for a weight living elsewhere.

    Shape, dtype and everything else that the meta device knows are answered. An operation that needs the values, that
    mixes it with real tensors or that would write to it raises an error with the weight's name instead of computing on
    nothing. `requires_grad_`, and casts in place such as those of `nn.Module.to`, are noted for the next load.
    """

    weight_name: str
    block_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation on the empty tensor, unless it needs values that are not here or would change them."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        found = _first_placeholder(tensors)
        if found is not None:
            written = _written(func, args, kwargs)
            if written is not None:
                raise _written_while_offloaded(written)
            with DisableTorchFunctionSubclass():
                mixed = any(not each.is_meta and each.dim() for each in tensors)
            if mixed and func is not torch.Tensor.__setattr__:
                raise _used_while_offloaded(found)
        try:
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if func == _SET_DATA or func in _SET_FLAG:
                    _note_change(args[0])
        except (NotImplementedError, RuntimeError, TypeError) as failure:
            if found is None or "meta" not in str(failure).lower():
                raise
            raise _used_while_offloaded(found) from failure
        if found is not None and type(result) is torch.Tensor and result.is_meta:
            keeps = func in _KEEP_VALUES and result.shape == found.shape and not found.__dict__.get("computed")
            return _mark(result.as_subclass(cls), found, computed=not keeps)
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> OffloadedTensor:
        """Copy the placeholder with its names; ties between copies are kept by `memo`."""
        known = memo.get(id(self))
        if isinstance(known, OffloadedTensor):
            return known
        twin = _make(self, self.weight_name, self.block_name)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, cast(Any, memo)))
        return twin

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle shape, dtype and names, as a part of the model."""
        if "computed" in self.__dict__:
            name = self.__dict__.get("weight_name", "?")
            raise OffloadError(
                "An offloaded weight cannot be saved from an empty state dict: the file would hold no values; got "
                f"{name!r}. Save what `get_state_dict_offloaded_model(model)` returns, or use `save_model`."
            )
        return _rebuild, (
            tuple(self.shape), self.dtype, self.requires_grad, isinstance(self, nn.Parameter), dict(self.__dict__)
        )  # fmt: skip


def _written(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> OffloadedTensor | None:
    """Return the placeholder that an operation would write to, or None."""
    out = kwargs.get("out")
    if out is not None:
        return _first_placeholder(out)
    if func == _SET_DATA:
        return None if _is_cast(args[0], args[1]) else _first_placeholder(args[0])
    # The name decides, as it does in torch: writing operations end with an underscore, those of `torch.nn.init` too.
    name = getattr(func, "__name__", "")
    writes = name in _DUNDER_WRITES or (name.endswith("_") and not name.endswith("__"))
    if not writes or func in _HARMLESS:
        return None
    target = args[0] if args else next(iter(kwargs.values()), None)
    return _first_placeholder(target)


def _is_cast(target: object, value: object) -> bool:
    """Return whether setting a placeholder's data to a value only changes its dtype, as `nn.Module.to` does."""
    if not isinstance(target, OffloadedTensor) or not isinstance(value, OffloadedTensor):
        return False
    with DisableTorchFunctionSubclass():
        same = target.shape == value.shape
    names = target.__dict__.get("weight_name"), value.__dict__.get("weight_name")
    return same and names[0] == names[1] and not value.__dict__.get("computed")


def _first_placeholder(value: object) -> OffloadedTensor | None:
    return next((each for each in tree_leaves(value) if isinstance(each, OffloadedTensor)), None)


def _note_change(tensor: object) -> None:
    """Count the changes of flag and dtype, so that a load sees at once whether to read them again."""
    if isinstance(tensor, OffloadedTensor):
        tensor.__dict__["changes"] = tensor.__dict__.get("changes", 0) + 1


def _used_while_offloaded(placeholder: OffloadedTensor) -> OffloadError:
    name = placeholder.__dict__.get("weight_name", "?")
    block = placeholder.__dict__.get("block_name", "?")
    return OffloadError(
        f"An offloaded weight was used outside the forward pass of its block; got weight {name!r} of block {block!r}, "
        "which is in memory only while that block runs. Call the block itself, list the class that uses its weights in "
        "`preload_module_classes`, or read the weight under `align_module_device`."
    )


def _written_while_offloaded(placeholder: OffloadedTensor) -> OffloadError:
    name = placeholder.__dict__.get("weight_name", "?")
    return OffloadError(
        f"An offloaded weight cannot be written to while it is away: nothing would change; got weight {name!r}. Write "
        "to it under `align_module_device`, assign a new parameter to the module, or change the weights before they "
        "are offloaded."
    )


def _mark(tensor: torch.Tensor, like: OffloadedTensor, *, computed: bool) -> torch.Tensor:
    """Name a tensor that was made from a placeholder after its weight, and note whether it has the same values."""
    tensor.__dict__["weight_name"] = like.__dict__.get("weight_name", "?")
    tensor.__dict__["block_name"] = like.__dict__.get("block_name", "?")
    tensor.__dict__["computed"] = computed
    return tensor


def _make(tensor: torch.Tensor, weight_name: str, block_name: str) -> OffloadedTensor:
    with DisableTorchFunctionSubclass():
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        made: OffloadedTensor = make_subclass(OffloadedTensor, empty, tensor.requires_grad)
        made.__dict__.update({key: value for key, value in own_attributes(tensor).items() if key != "_backward_hooks"})
        if isinstance(tensor, nn.Parameter):
            made.__dict__["_is_param"] = True  # by this `isinstance(made, nn.Parameter)` is true
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
    """Return whether a tensor only stands for an offloaded weight."""
    return isinstance(tensor, OffloadedTensor)


# Torch's dictionary by identity has no types of its own.
_placeholders: MutableMapping[torch.Tensor, OffloadedTensor] = cast(Any, WeakIdKeyDictionary)()
_watched: MutableMapping[torch.Tensor, str] = cast(Any, WeakIdKeyDictionary)()


def placeholder_for(tensor: torch.Tensor, weight_name: str, block_name: str) -> torch.Tensor:
    """Make the empty tensor that a module shows while a weight is offloaded."""
    if isinstance(tensor, OffloadedTensor):
        return tensor
    # The same tensor always gets the same placeholder, so that ties survive.
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
    """Allow a tensor to be trained again: it is back in its module."""
    if tensor in _watched:
        del _watched[tensor]
    if tensor in _placeholders:
        del _placeholders[tensor]


@functools.cache
def _watch_optimizers() -> None:
    """Make every optimizer step check that it trains no offloaded weight (torch's global step hook)."""
    register_optimizer_step_pre_hook(_refuse_offloaded)


def _refuse_offloaded(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not _watched and not _placeholders:  # called before each step of every optimizer
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = parameter.__dict__.get("weight_name") if is_placeholder(parameter) else _watched.get(parameter)
            if name is not None:
                raise OffloadError(
                    f"An optimizer cannot train an offloaded weight; got {name!r} in a {type(optimizer).__name__}. "
                    "Give the optimizer parameters that stay on their device (adapters), or remove the hooks first."
                )


def _refuse_gradient(weight_name: str, gradient: torch.Tensor) -> None:
    """Raise when a gradient reaches an offloaded weight: it would be lost with the copy on the device."""
    raise OffloadError(
        f"A gradient reached an offloaded weight, where it would be lost; got a gradient for {weight_name!r}. Freeze "
        "the offloaded weights with `requires_grad_(False)` and train the rest, or keep this weight on a device."
    )


def forbid_gradient(parameter: torch.Tensor, weight_name: str) -> None:
    """Make the backward pass raise when it computes a gradient for a loaded weight; passing through it is fine."""
    cast(Any, parameter).register_hook(functools.partial(_refuse_gradient, weight_name))
