"""What parameters have that sharding or splitting replaces: attributes, hooks and number formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_core._torch import has_gradient_hooks
from accel_core.errors import PreparationError
from accel_core.modules.unwrap import canonical_name

_SHOWN = 8


def is_half(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a format of half precision."""
    return parameter.dtype in (torch.float16, torch.bfloat16)


def keep_masters(model: nn.Module) -> None:
    """Convert what trains in half precision to float32, which steps need; the policy casts for the computation."""
    made: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or not is_half(parameter):
                continue
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()  # in place, so optimizers follow
                continue
            # A spread tensor does not change its format in place; ties stay.
            if id(parameter) not in made:
                made[id(parameter)] = parameter, nn.Parameter(parameter.detach().float())
            module._parameters[name] = made[id(parameter)][1]


@contextmanager
def keeping_marks(model: nn.Module) -> Iterator[None]:
    """Give parameters that are made in the block the attributes that users set on those of the same names before."""
    marks = {
        canonical_name(name): vars(parameter).copy()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if type(parameter) in (nn.Parameter, DTensor)
    }
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for mark, value in marks.get(canonical_name(name), {}).items():
            vars(parameter).setdefault(mark, value)  # what the new one has of its own counts more


def refuse_hooks(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse hooks on parameters that training will no longer use, because they would never be called."""
    # Not carried over: nobody can tell whether a hook made for a whole gradient is right for a part of it.
    found = [name for name, parameter in parameters if has_gradient_hooks(parameter)]
    if found:
        raise PreparationError(
            "Preparing replaces parameters, and hooks of the old ones would never be called; got hooks of "
            f"{_listed(found)}. Remove them, and change gradients between accelerator.backward() and optimizer.step(), "
            "where each rank has its part of the reduced gradient."
        )


def refuse_mixed(reason: str, block: str, dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Refuse parameters of a block that do not have one number format."""
    names: dict[str, list[str]] = {}
    for name, dtype in dtypes:
        names.setdefault(str(dtype).removeprefix("torch."), []).append(name)
    if len(names) > 1:
        # The few exceptions come first, and are not cut off.
        held = "; ".join(f"{dtype} for {_listed(names[dtype])}" for dtype in sorted(names, key=lambda d: len(names[d])))
        raise PreparationError(
            f"{reason}; got {held} in {block}. Give them one dtype, name the class of the modules that differ in "
            "transformer_cls_names_to_wrap, or set mixed_precision, which keeps weights of half precision in 32 bits."
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
