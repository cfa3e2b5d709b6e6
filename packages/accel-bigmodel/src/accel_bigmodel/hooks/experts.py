"""Runs offloaded experts one by one, and brings only those that tokens chose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.hooks.residency import Residency, residency_of
from accel_bigmodel.hooks.slot import Slot
from accel_bigmodel.offload.experts import ExpertCache
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import normal_tensors
from accel_core.errors import OffloadError
from accel_core.modules import packed
from accel_core.modules.experts import are_stacked, inputs_by_place

__all__ = ["ExpertsHook", "attach_experts_hook", "can_come_alone"]

Device = int | str | torch.device | None


def can_come_alone(module: nn.Module) -> bool:
    """Return whether each of a module's experts can be read without the others."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return (
        are_stacked(module)
        and "_hf_hook" not in module.__dict__
        and all(buffer is None for buffer in module._buffers.values())
        and not any(packed.find(parameter) for parameter in own)
    )


class ExpertsHook(AlignDevicesHook):
    """Keeps a module's experts away; its forward brings the chosen ones through a cache.

    Args:
        cache: The cache, one for all experts of a model.
        name: The module's dotted name, for the report.
        device: Where the experts compute.
        weights_map: Offloaded weights by name in the module.
    """

    def __init__(
        self, cache: ExpertCache, name: str, device: Device, weights_map: Mapping[str, torch.Tensor] | None
    ) -> None:
        super().__init__(execution_device=device, offload=True, weights_map=weights_map)
        self.cache = cache
        self.name = name

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs; the forward itself brings the weights."""
        return self.move_inputs(module, args, kwargs)

    def leave_forward(self, module: nn.Module, output: object) -> Any:
        """Return the output."""
        return output

    def abort_forward(self, module: nn.Module) -> None:
        """Do nothing: the forward leaves the module as it was."""


def attach_experts_hook(module: nn.Module, hook: ExpertsHook) -> None:
    """Put a hook on experts, and let their forward run the chosen ones alone."""
    add_hook_to_module(module, hook)
    object.__setattr__(module, "_old_forward", _ChosenExperts(module, module.__dict__["_old_forward"], hook))


class _ChosenExperts:
    """The forward of experts that are away: it runs each chosen one on the tokens that chose it.

    Sums are formed in the order of the experts' numbers, as transformers' own loop over experts forms them.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., torch.Tensor], hook: ExpertsHook) -> None:
        self.module, self.forward, self.hook = module, forward, hook
        self.name = hook.name
        self.count: int = module.num_experts  # type: ignore[assignment]  # while one runs, the module has one
        self._begin()

    def _begin(self) -> None:
        # Two threads cannot have two experts stand in one module.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out of copies and pickles."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without forwards."""
        self.__dict__.update(state)
        self._begin()

    def __getattr__(self, name: str) -> Any:
        """Look up what the forward would have, such as `__func__` and `__name__`."""
        if name.startswith("_lock") or "forward" not in self.__dict__:  # being copied or unpickled
            raise AttributeError(name)
        return getattr(self.forward, name)

    @property
    def __wrapped__(self) -> Callable[..., torch.Tensor]:
        """The module's own forward, for `inspect.signature`."""
        return self.forward

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Run the experts that tokens chose; compiled graphs are left meanwhile, for the experts are read."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        with self._lock:
            if all(slot.store.get(slot.key) is slot.placeholder for slot in self.slots):
                return self._run(*inputs_by_place(self.forward, args, kwargs))
        # Weights that somebody assigned, or that `align_module_device` holds here, are computed with as they are.
        residency = self._residency
        residency.enter()
        try:
            return self.forward(*args, **kwargs)
        finally:
            residency.leave()

    def _run(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen: list[int] = torch.unique(numbers).tolist()
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.count:
            raise OffloadError(
                f"A router chose an expert that is not there; got the numbers {chosen[0]} to {chosen[-1]} for "
                f"{self.count} experts of {self.name}. Correct the router."
            )
        output = torch.zeros_like(tokens)
        for number, brought in zip(chosen, self.hook.cache.bring(self, chosen, len(tokens)), strict=True):
            choice, rows = torch.where((numbers == number).T)  # the order in which transformers' loop takes them
            parts = {slot.name: slot.wrapped(brought[slot.name]) for slot in self.slots}
            with _standing_in(self.module, parts):
                part = self.forward(tokens[rows], torch.zeros_like(rows)[:, None], weights[rows, choice][:, None])
            output = output.index_add(0, rows, part.to(output.dtype))
        return output

    @property
    def _residency(self) -> Residency:
        residency = residency_of(self.module, self.hook)
        assert residency is not None  # the hook made it when it was attached
        return residency

    @property
    def slots(self) -> Sequence[Slot]:
        """The places of the module's weights."""
        return self._residency.slots

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(slot.shape[1:].numel() * slot.dtype.itemsize for slot in self.slots)

    def state(self) -> tuple[object, ...]:
        """Return what changes when weights were cast, moved, replaced or written to while they were away."""
        found: list[object] = [self.hook.device]
        for slot in self.slots:
            slot.refresh()
            stored = self._stored(slot.name)
            found += [stored, slot.dtype, None if stored.is_inference() else stored._version]
        return tuple(found)

    def _store(self) -> tuple[Mapping[str, torch.Tensor], str]:
        weights = self._residency.weights()
        return (weights.dataset, weights.prefix) if isinstance(weights, PrefixedDataset) else (weights, "")

    def _stored(self, name: str) -> torch.Tensor:
        """Return all experts' weights of a name as they are stored: a view of the file's map, or in memory."""
        store, prefix = self._store()
        try:
            return store.stored(prefix + name) if isinstance(store, OffloadedWeightsLoader) else store[prefix + name]
        except KeyError as failure:
            raise OffloadError(
                f"An offloaded weight is not in its weights map; got no {failure} for {name!r} of {self.name}. Pass a "
                "map that holds every tensor of the module."
            ) from failure

    def read(self, number: int) -> tuple[dict[str, torch.Tensor], int, int]:
        """Return an expert's weights on the device that computes, and the bytes from disk and from host memory."""
        store, prefix = self._store()
        found: dict[str, torch.Tensor] = {}
        from_disk = from_host = 0
        for slot in self.slots:
            name = prefix + slot.name
            stored = self._stored(slot.name)
            if stored.shape != slot.shape:
                raise OffloadError(
                    f"An offloaded weight does not have the shape of its parameter; got {tuple(stored.shape)} for "
                    f"{name!r}, which has {tuple(slot.shape)}. Put a weight of that shape into the weights map."
                )
            place = store.file_of(name) if isinstance(store, OffloadedWeightsLoader) else None
            if place is not None:
                place[0].will_need(place[1], number)
            with normal_tensors():
                source = stored[number : number + 1]
                # A copy: the pages of the map are let go, and the cache's bytes are its own.
                found[slot.name] = source.to(self.hook.device, slot.dtype, copy=True)
            if place is None:
                from_host += source.nbytes
            else:
                from_disk += source.nbytes
                # What was written to the map lies in these pages alone. Inference tensors have no count of writes.
                if stored.is_inference() or not stored._version:
                    place[0].done_with(place[1], number)
        return found, from_disk, from_host


@contextmanager
def _standing_in(module: nn.Module, parts: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module compute with one expert."""
    parameters: dict[str, torch.Tensor | None] = module._parameters  # type: ignore[assignment]
    before, count = parameters.copy(), module.num_experts
    parameters.update(parts)
    module.num_experts = 1  # type: ignore[assignment]
    try:
        yield
    finally:
        parameters.update(before)
        module.num_experts = count
