"""Optimizers that follow their parameters when preparing a model replaces these."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import PreparationError
from accel_core.mesh.tensor import is_exchanged, is_spread, placed_like
from accel_core.modules.unwrap import canonical_name

_Seen = tuple[weakref.ref[torch.nn.Module], str]
_Change = tuple[list[torch.nn.Parameter], int, torch.nn.Parameter]
_SHOWN = 8


class ParameterNames:
    """Remembers which model a parameter belongs to, and under which name.

    Sharding a model, or moving it where torch cannot move in place, replaces its parameters; an optimizer that was made
    before holds those that were. By name it is pointed to those that are, whether it is prepared before, together with
    or after its model. Everything is held weakly.
    """

    def __init__(self) -> None:
        self._seen: MutableMapping[torch.Tensor, _Seen] = WeakIdKeyDictionary()
        self._released: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def remember(self, model: torch.nn.Module) -> None:
        """Note the names of a bare model's parameters; a name that was noted first stays."""
        owner = weakref.ref(model)
        for name, parameter in model.named_parameters():
            if is_exchanged(parameter) and not is_spread(parameter):
                self._released.add(model)
            elif parameter not in self._seen:
                self._seen[parameter] = (owner, canonical_name(name))

    def release(self, model: torch.nn.Module) -> None:
        """Let go of the spread parameters that a bare model has now; from here on they are looked up in the model."""
        self._released.add(model)
        # `Module.to` and its kin exchange such parameters in place, which torch refuses while a weak reference to one
        # exists.
        for parameter in model.parameters():
            if is_spread(parameter):
                self._seen.pop(parameter, None)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of a replaced parameter whose name and shape its model no longer has."""
        self._changes(optimizer)

    def strange(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return where an optimizer holds parameters that no remembered model has."""
        released = {id(parameter) for model in self._released for parameter in model.parameters()}
        return [
            f"group {index}: a parameter of shape {tuple(parameter.shape)}"
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter not in self._seen and id(parameter) not in released
        ]

    def trained(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters, and in place of those that preparing replaced the ones that have their gradients."""
        if all(parameter.grad is not None or not parameter.requires_grad for parameter in parameters):
            return parameters
        return self.successors(parameters)

    def successors(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters, each that was replaced by the one that its model has now.

        Raises:
            PreparationError: The model has none of that name and shape.
        """
        now: dict[int, dict[str, torch.nn.Parameter]] = {}
        found = []
        for parameter in parameters:
            place = self._place(parameter, now)
            if place is None:
                found.append(parameter)
                continue
            name, current = place
            if current is None:
                raise PreparationError(
                    f"Preparing a model replaced its parameters; got {name} as it was before, which has no gradient. "
                    "Pass the parameters of the prepared model."
                )
            found.append(current)
        return found

    def _place(
        self, parameter: torch.Tensor, now: dict[int, dict[str, torch.nn.Parameter]]
    ) -> tuple[str, torch.nn.Parameter | None] | None:
        """Return a parameter's name, and what its model has under it if that fits; `None` if not known.

        What had no memory had no values either, so anything takes its place; else the shape is the same.
        """
        seen = self._seen.get(parameter)
        model = None if seen is None else seen[0]()
        if seen is None or model is None:
            return None
        if id(model) not in now:
            now[id(model)] = {canonical_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        current = now[id(model)].get(seen[1])
        kept = parameter.is_meta or (current is not None and current.shape == parameter.shape)
        return seen[1], current if kept else None

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer to the parameters that its models have now, its state with them."""
        for parameters, place, new in self._changes(optimizer):
            # In place: optimizers such as LBFGS keep the list itself.
            old, parameters[place] = parameters[place], new
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {key: placed_like(value, new) for key, value in state.items()}

    def _changes(self, optimizer: torch.optim.Optimizer) -> list[_Change]:
        """Return, for each replaced parameter, its list, its place there and its successor."""
        changes: list[_Change] = []
        lost: list[str] = []
        now: dict[int, dict[str, torch.nn.Parameter]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                found = self._place(parameter, now)
                if found is None:
                    continue
                name, current = found
                if current is None:
                    lost.append(f"group {index}: {name}")
                elif current is not parameter:
                    changes.append((group["params"], place, current))
        if lost:
            raise PreparationError(
                f"The optimizer {type(optimizer).__name__} holds parameters that its model no longer has; got "
                f"{', '.join(lost[:_SHOWN])}{' …' if len(lost) > _SHOWN else ''}; stepping it would train nothing. "
                "Make the optimizer from the prepared model's parameters."
            )
        return changes
