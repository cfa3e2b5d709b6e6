"""The placeholder for an offloaded weight: it is empty, and raises when its values are needed or would change."""

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

# Python creates these at every look-up, so they are compared by equality.
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
# They change what the placeholder says about the weight, which counts when the weight is loaded.
_CHANGES = frozenset({"requires_grad_", "__set__"})
# What they return has the weight's values, at most in another dtype: it can stand for the weight.
_KEEP_VALUES = frozenset({"bfloat16", "clone", "contiguous", "detach", "double", "float", "half", "to", "type"})


class OffloadedTensor(torch.Tensor):
    """A tensor on the meta device that stands for a weight living elsewhere.

    Shape, dtype and everything else that the meta device knows are answered. An operation that needs the values, that
    mixes it with real tensors or that would write to it raises an error with the weight's name instead of computing on
    nothing. `requires_grad_`, and casts in place such as those of `nn.Module.to`, are noted for the next load.

    Attributes:
        weight_name: The weight's name in the model.
        block_name: The name of the module whose hook loads it.
        changes: How often what some placeholder says of its weight was changed.
    """

    weight_name = "?"
    block_name = "?"
    changes = 0

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation on the empty tensor, unless it needs values that are not here or would change them."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        away = [each for each in tensors if isinstance(each, OffloadedTensor)]
        if func == _SET_DATA and isinstance(args[0], OffloadedTensor) and not _is_cast(args[0], args[1]):
            raise _written_while_offloaded(args[0])
        with DisableTorchFunctionSubclass():
            mixed = any(not each.is_meta and each.dim() for each in tensors)
            before = [_writes(each) for each in away]
            failure = result = None
            try:
                result = func(*args, **(kwargs or {}))
            except (NotImplementedError, RuntimeError, TypeError) as raised:
                failure = raised
            # Torch counts writes, whatever the operation is called; to an empty tensor nothing was written.
            written = [each for each, version in zip(away, before, strict=True) if _writes(each) != version]
        if written and func != _SET_DATA:
            raise _written_while_offloaded(written[0]) from failure
        if away and (mixed or "meta" in str(failure).lower()):
            raise _used_while_offloaded(away[0]) from failure
        if failure is not None:
            raise failure
        if func.__name__ in _CHANGES and isinstance(args[0], OffloadedTensor):
            OffloadedTensor.changes += 1
        if away and type(result) is torch.Tensor and result.is_meta:
            keeps = func.__name__ in _KEEP_VALUES or func == _GET_DATA
            computed = not keeps or result.shape != away[0].shape or bool(away[0].__dict__.get("computed"))
            result = result.as_subclass(cls)
            result.__dict__.update(weight_name=away[0].weight_name, block_name=away[0].block_name, computed=computed)
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> OffloadedTensor:
        """Copy the placeholder with its names; ties between copies are kept by `memo`."""
        memo[id(self)] = twin = _make(self, {})
        twin.__dict__.update(copy.deepcopy(self.__dict__, cast(Any, memo)))
        return twin

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle shape, dtype and names, as a part of the model."""
        if "computed" in self.__dict__:
            raise OffloadError(
                "An offloaded weight cannot be saved from an empty state dict: the file would hold no values; got "
                f"{self.weight_name!r}. Save what `get_state_dict_offloaded_model(model)` returns, or use `save_model`."
            )
        with DisableTorchFunctionSubclass():
            plain = torch.empty_like(self.as_subclass(torch.Tensor)).requires_grad_(self.requires_grad)
        return _make, (plain, dict(self.__dict__))


def _writes(tensor: torch.Tensor) -> int:
    # What is computed in inference mode has no count; weights' own placeholders are made outside of it.
    return 0 if tensor.is_inference() else tensor._version


def _is_cast(target: OffloadedTensor, value: object) -> bool:
    """Return whether setting a placeholder's data to a value only changes its dtype, as `nn.Module.to` does."""
    return (
        isinstance(value, OffloadedTensor)
        and (target.weight_name, target.size()) == (value.weight_name, value.size())
        and not value.__dict__.get("computed")
    )


def _used_while_offloaded(placeholder: OffloadedTensor) -> OffloadError:
    return OffloadError(
        f"An offloaded weight was used outside the forward pass of its block; got weight {placeholder.weight_name!r} "
        f"of block {placeholder.block_name!r}, which is in memory only while that block runs. Call the block itself, "
        "list the class that uses its weights in `preload_module_classes`, or read the weight under "
        "`align_module_device`."
    )


def _written_while_offloaded(placeholder: OffloadedTensor) -> OffloadError:
    return OffloadError(
        "An offloaded weight cannot be written to while it is away: nothing would change; got weight "
        f"{placeholder.weight_name!r}. Write to it under `align_module_device`, assign a new parameter to the module, "
        "or change the weights before they are offloaded."
    )


def _make(tensor: torch.Tensor, attributes: Mapping[str, Any]) -> OffloadedTensor:
    """Make a placeholder of a tensor's form."""
    with DisableTorchFunctionSubclass(), torch.inference_mode(False):
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        made: OffloadedTensor = make_subclass(OffloadedTensor, empty, tensor.requires_grad)
    made.__dict__.update(attributes)
    return made


def is_placeholder(tensor: object) -> bool:
    """Return whether a tensor only stands for an offloaded weight."""
    return isinstance(tensor, OffloadedTensor)


# The same tensor always gets the same placeholder, so that ties survive.
# Torch's dictionary by identity has no types of its own.
_placeholders: MutableMapping[torch.Tensor, OffloadedTensor] = cast(Any, WeakIdKeyDictionary)()


def placeholder_for(tensor: torch.Tensor, weight_name: str, block_name: str) -> torch.Tensor:
    """Make the empty tensor that a module shows while a weight is offloaded."""
    made = tensor if isinstance(tensor, OffloadedTensor) else _placeholders.get(tensor)
    if made is None or made.size() != tensor.size() or made.dtype != tensor.dtype:
        _watch_optimizers()
        attributes = {key: value for key, value in own_attributes(tensor).items() if key != "_backward_hooks"}
        attributes["block_name"] = block_name
        if isinstance(tensor, nn.Parameter):
            attributes["_is_param"] = True  # by this `isinstance(made, nn.Parameter)` is true
        made = _placeholders[tensor] = _make(tensor, attributes)
    made.__dict__["weight_name"] = weight_name
    made.__dict__.setdefault("names", []).append(weight_name)
    return made


def forget(tensor: torch.Tensor) -> None:
    """Allow a tensor to be trained again: it is back in its module."""
    _placeholders.pop(tensor, None)


@functools.cache
def _watch_optimizers() -> None:
    """Make every optimizer step check that it trains no offloaded weight (torch's global step hook)."""
    register_optimizer_step_pre_hook(_refuse_offloaded)


def _refuse_offloaded(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups if _placeholders else ():  # called before each step of every optimizer
        for parameter in group["params"]:
            away = _placeholders.get(parameter, parameter)
            if isinstance(away, OffloadedTensor):
                raise OffloadError(
                    f"An optimizer cannot train an offloaded weight; got {away.weight_name!r} in a "
                    f"{type(optimizer).__name__}. Give the optimizer parameters that stay on their device (adapters), "
                    "or remove the hooks first."
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
