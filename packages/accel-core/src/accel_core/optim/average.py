"""Averages of a model's weights, over the parts that each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accel_core.errors import CheckpointMismatchError, ConfigurationError, PreparationError, StateError, expect_one_of
from accel_core.mesh.tensor import local_memory, spread_over
from accel_core.modules.unwrap import canonical_name

_AVERAGE = "average"
_SHOWN = 5
Buffers = Literal["copy", "average"]
_applied: MutableMapping[nn.Module, ModelAverage] = WeakKeyDictionary()


class ModelAverage:
    """An exponential moving average of the weights of a prepared model; `Accelerator.ema` makes one.

    After every step of an optimizer that was really made, the parameters that it trains are averaged:
    `average = decay * average + (1 - decay) * weight`, in one operation over what this rank holds, without an exchange.
    Only parameters that train when the average is made have one. Averages of weights in 16 bits have 32 bits. It is
    saved and restored with the state of the run.

    Args:
        model: The prepared model.
        held: Returns those of its parameters and buffers that this rank holds now, whole or in parts.
        decay: The share of the average that an update keeps, from 0 to 1.
        every: Number of optimizer steps between two updates.
        device: Where the average is kept; `None` keeps each part where its weight is.
        buffers: Average floating-point buffers too; else a model has its own under the average.

    Attributes:
        model (torch.nn.Module): The prepared model.
        decay (float): The share that an update keeps.
        every (int): Number of optimizer steps between two updates.

    Raises:
        PreparationError: A weight has no memory here, or none trains.

    Examples:
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> ema = accelerator.ema(model, decay=0.99)
        >>> with ema.applied():
        ...     scores = model(torch.rand(2, 64))
    """

    def __init__(
        self,
        model: nn.Module,
        held: Callable[[], Iterable[Tensor]],
        *,
        decay: float,
        every: int,
        device: torch.device | None,
        buffers: bool,
    ) -> None:
        self.model, self.decay, self.every = model, decay, every
        self._held = held
        self._is_applied = False
        self._looked = False
        there = set(held())  # first: it frees what was gathered in the place of parts
        tensors = [*model.parameters(), *(model.buffers() if buffers else ())]
        if any(tensor.is_meta for tensor in tensors):
            raise PreparationError(
                f"An average needs the weights in memory; got a {type(model).__name__} with weights on the meta device "
                "or on disk. Load it without a device map that offloads, and prepare it."
            )
        if not any(tensor.requires_grad for tensor in tensors):
            raise PreparationError(
                f"An average follows parameters that train; got a {type(model).__name__} without any. Call "
                "requires_grad_() before prepare(), or evaluate the model as it is."
            )
        averaged = [tensor for tensor in tensors if tensor in there and _is_averaged(tensor)]
        self.state = AverageState(tensors, averaged, device, self._check)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Put the average in the place of the weights, in their number format, for the length of the block.

        Every rank enters it. The weights come back where it ends, by an exception too. Models are evaluated and saved
        inside; they do not train there.

        Yields:
            The model.

        Raises:
            StateError: It is applied already, or the model has other parameters than when it was made.

        Examples:
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> ema = accelerator.ema(model)
            >>> with ema.applied():
            ...     accelerator.save_model(model, "averaged")
        """
        self.refuse_applied("applied()")
        self._check()
        kept: list[tuple[Tensor, Tensor | None]] = []
        self._is_applied = True
        modules = dict.fromkeys(self.model.modules(), self)
        _applied.update(modules)
        hooks = [each.register_load_state_dict_pre_hook(_refuse_loading) for each in modules]  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad():
                for weight, average in self._pairs(self.state.averages):
                    shown = weight.detach()  # the memory of the average from now on, wherever a cast takes the weight
                    kept.append((shown, _exchanged(weight, average, shown)))
            torch.clear_autocast_cache()  # an autocast block around this one keeps weights that it has cast
            yield self.model
        finally:
            self._held()  # an evaluation may have left gathered averages, with which the next pass would go on
            with torch.no_grad():
                # Fewer were exchanged where memory ran out.
                for (weight, average), (shown, before) in zip(self._pairs(self.state.averages), kept, strict=False):
                    if before is None:
                        _exchanged(weight, average, shown)
                    else:
                        weight.copy_(before)
            torch.clear_autocast_cache()
            for hook, module in zip(hooks, modules, strict=True):
                hook.remove()
                _applied.pop(module, None)
            self._is_applied = False

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the parameters that an optimizer has just stepped, if it is their turn."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        turn, first = self.state.count(stepped, self.every)
        if not turn:
            return
        if not self._looked:  # ranks of a pipeline know from their first step on who holds what is outside of blocks
            self._check()
            self._looked = True
        others = [each for each in self.state.averages if first and not isinstance(each, nn.Parameter)]
        fused: tuple[list[Tensor], list[Tensor]] = ([], [])
        for weight, average in self._pairs([*stepped, *others]):
            if _is_alike(weight, average):
                fused[0].append(average)
                fused[1].append(weight)
            else:
                average.lerp_(weight.to(average), 1 - self.decay)
        if fused[0]:
            get_ema_multi_avg_fn(self.decay)(*fused, 0)  # type: ignore[no-untyped-call]

    def refuse_applied(self, operation: str) -> None:
        """Refuse an operation that would take the applied average for the weights."""
        if self._is_applied:
            raise StateError(
                f"The model has its averaged weights inside of `with ema.applied()`; got {operation} there. Evaluate "
                "and save_model inside, and call it after the block."
            )

    def _pairs(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what this rank holds of each weight, and of its average."""
        averages = self.state.averages
        for tensor in tensors:
            if tensor in averages:
                yield local_memory(tensor), averages[tensor]

    def _check(self) -> None:
        """Let go of what other ranks turned out to hold; refuse parameters that came after the average was made."""
        held, averages = set(self._held()), self.state.averages
        trained = (each for each in self.model.parameters() if each in held)
        new = {id(each) for each in trained if _is_averaged(each) and each not in averages}
        if new:
            names = [canonical_name(name) for name, each in self.model.named_parameters() if id(each) in new]
            raise StateError(
                f"An average has the parameters that trained when it was made; got {len(new)} more: "
                f"{', '.join(names[:_SHOWN])}. Call accelerator.ema after the model got them, and before it trains."
            )
        for tensor in [each for each in averages if each not in held]:
            del averages[tensor]

    def __repr__(self) -> str:
        return f"ModelAverage({type(self.model).__name__}, decay={self.decay}, every={self.every})"


class AverageState(torch.optim.Optimizer):
    """Averages as the state of an optimizer: every engine's checkpoint stores and reshards them as it does momentum."""

    def __init__(
        self,
        tensors: list[Tensor],
        averaged: list[Tensor],
        device: torch.device | None,
        check: Callable[[], None],
    ) -> None:
        super().__init__([tensor for tensor in tensors if _is_number(tensor)], {"steps": {}})
        self.averages = {tensor: _copied(local_memory(tensor.detach()), device) for tensor in averaged}
        self._places = {tensor: place for place, tensor in enumerate(self.param_groups[0]["params"])}
        self._check = check

    def count(self, stepped: list[Tensor], every: int) -> tuple[bool, bool]:
        """Count a step of an optimizer; return whether it ends a turn, and whether the optimizer is the first of all.

        An optimizer is known by the first of its parameters that has an average: the same one on every rank.
        """
        place = next((self._places[each] for each in stepped if each in self._places), None)
        if place is None:
            return False, False
        steps: dict[str, int] = self.param_groups[0]["steps"]
        steps[str(place)] = steps.get(str(place), 0) + 1
        return steps[str(place)] % every == 0, place == min(map(int, steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages where their weights are, spread as these are, and the counted steps."""
        self._check()
        state = {
            self._places[tensor]: {_AVERAGE: spread_over(average.to(tensor.device), tensor)}
            for tensor, average in self.averages.items()
        }
        steps = dict(self.param_groups[0]["steps"])
        return {"state": state, "param_groups": [{"steps": steps, "params": list(range(len(self._places)))}]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over averages, in their own number format, and counted steps; refuse a state that lacks one."""
        (group,) = state_dict["param_groups"]
        found = dict(zip(self._places, group["params"], strict=True))
        entries = {tensor: state_dict["state"].get(found[tensor], {}) for tensor in self.averages}
        lacking = [entry for entry in entries.values() if _AVERAGE not in entry]
        if lacking:
            raise CheckpointMismatchError(
                f"A checkpoint holds an average of each parameter; got {len(lacking)} parameters without one. Load a "
                "checkpoint that was saved with the same parameters training."
            )
        for tensor, entry in entries.items():
            self.averages[tensor].copy_(local_memory(entry[_AVERAGE]))
        self.param_groups[0]["steps"] = dict(group.get("steps", {}))


def check_settings(decay: float, every: int, device: Any, buffers: object) -> torch.device | None:
    """Return the device for an average; refuse settings that cannot be."""
    if not 0 <= decay <= 1:
        raise ConfigurationError(
            f"The decay of an average is the share that it keeps, from 0 to 1; got {decay!r}. Pass 0.999, for example."
        )
    if every < 1:
        raise ConfigurationError(f"An average is updated every 1 or more optimizer steps; got {every!r}. Pass 1.")
    expect_one_of(("copy", "average"), "buffers", buffers)
    return None if device is None else torch.empty(0, device=device).device


def _is_averaged(tensor: Tensor) -> bool:
    """Return whether a parameter trains, or a buffer holds numbers; of an empty part, nothing is averaged."""
    trains = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    return trains and _is_number(tensor) and tensor.numel() > 0


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copied(weight: Tensor, device: torch.device | None) -> Tensor:
    """Return a copy that averages can be exact in: a small share of a weight is lost in 16 bits."""
    dtype = torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype
    return weight.to(device or weight.device, dtype, copy=True)


def _is_alike(weight: Tensor, average: Tensor) -> bool:
    return weight.dtype == average.dtype and weight.device == average.device


def _exchanged(weight: Tensor, average: Tensor, shown: Tensor) -> Tensor | None:
    """Put an average in the place of its weight; return what was shown, or exchange them if one can hold the other."""
    before = shown.to(average.device, copy=True)
    weight.copy_(average)
    if not _is_alike(shown, average):
        return before
    average.copy_(before)
    return None


def _refuse_loading(module: nn.Module, *_: object) -> None:
    if module in _applied:  # a copy that was made inside has this hook, too
        _applied[module].refuse_applied("load_state_dict()")
