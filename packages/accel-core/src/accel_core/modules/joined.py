"""Modules that take a place in a model after it was prepared, so that nothing averages or steps their parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import PreparationError
from accel_core.logging import get_logger
from accel_core.mesh.tensor import is_exchanged

__all__ = ["check_step", "noted", "refuse_unaveraged", "watch"]

logger = get_logger(__name__)


class Joined(NamedTuple):
    """A module that took a place in a prepared model, and the identities of the parameters that were there."""

    model: ReferenceType[torch.nn.Module]
    parent: ReferenceType[torch.nn.Module]
    name: str
    replaced: frozenset[int]

    def with_gradients(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names in the model, and parameters, of what joined it and has gradients."""
        model, parent = self.model(), self.parent()
        module = None if parent is None else parent._modules.get(self.name)
        if model is None or module is None:
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) in names and parameter not in _prepared:
                yield names[id(parameter)], parameter


noted: list[Joined] = []
"""What joined prepared models, until they are prepared again; empty in nearly all runs."""
_models: MutableMapping[torch.nn.Module, ReferenceType[torch.nn.Module]] = WeakIdKeyDictionary()
_prepared: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
"""Prepared parameters but those that torch cannot exchange while a weak reference to them lives."""
_watches = False


def watch(model: torch.nn.Module) -> None:
    """Note from now on what takes a place in a model; all that it has at present was prepared."""
    global _watches
    if not _watches:
        register_module_module_registration_hook(_note)
        _watches = True
    noted[:] = [each for each in noted if each.model() not in (None, model)]
    _models.update(dict.fromkeys(model.modules(), ref(model)))
    _prepared.update(dict.fromkeys(each for each in model.parameters() if not is_exchanged(each)))


def _note(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    owner = _models.get(parent)
    model = None if owner is None else owner()
    if model is None or module is None:
        return
    _models.update(dict.fromkeys(module.modules(), ref(model)))
    if all(is_exchanged(each) or each in _prepared for each in module.parameters()):
        return
    before = parent._modules.get(name)
    replaced = frozenset(() if before is None else map(id, before.parameters()))
    noted[:] = [each for each in noted if (each.parent(), each.name) != (parent, name)]
    noted.append(Joined(ref(model), ref(parent), name, replaced))


def refuse_unaveraged() -> None:
    """Refuse gradients of what joined a model that several ranks train."""
    names = [name for each in noted for name, _ in each.with_gradients()]
    if names:
        raise PreparationError(
            "Modules that take a place in a model after prepare() are not averaged over the ranks; got gradients of "
            f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}. Put them there before prepare(), or call "
            "accelerator.free_memory() and prepare the model again, with an optimizer made from its parameters."
        )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what ranks did not average; on one, warn of an optimizer that steps only what was replaced."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        refuse_unaveraged()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for each in list(noted):
        names = [name for name, parameter in each.with_gradients() if id(parameter) not in held]
        if names and not held.isdisjoint(each.replaced):
            logger.warning(
                "The optimizer %s holds parameters that were replaced after prepare(); got gradients of %s, which it "
                "does not step. Make an optimizer from the parameters that the model has now.",
                *(type(optimizer).__name__, ", ".join(names)),
            )
            noted.remove(each)
