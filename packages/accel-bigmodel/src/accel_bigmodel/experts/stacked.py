"""Runs offloaded experts one by one, and brings only those that tokens chose."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import nn

from accel_bigmodel.experts.cache import ExpertCache, Guess
from accel_bigmodel.experts.source import Brought, ExpertSource, Part
from accel_bigmodel.gguf.packed import GgufWeight
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.hooks.residency import Residency, Slot, residency_of
from accel_bigmodel.offload.store import PrefixedDataset
from accel_core.errors import OffloadError
from accel_core.modules import packed
from accel_core.modules.experts import are_stacked, inputs_by_place


def loadable_per_expert(module: nn.Module) -> bool:
    """Return whether each expert of a module can be loaded without the others."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return (
        are_stacked(module)
        and "_hf_hook" not in module.__dict__
        and all(buffer is None for buffer in module._buffers.values())
        and all(packed.find(parameter) is None or _has_rows(parameter) for parameter in own)
    )


def _has_rows(tensor: torch.Tensor) -> TypeGuard[GgufWeight]:
    return isinstance(tensor, GgufWeight) and tensor.is_by_rows


class _ExpertsHook(AlignDevicesHook):
    """Keeps a module's experts away; its forward brings the chosen ones through the one cache of a model."""

    is_prefetched = False  # which experts will be needed is not known before the router ran

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


class _Chosen(BaseException):
    def __init__(self, source: _ChosenExperts, numbers: torch.Tensor) -> None:
        self.source, self.numbers = source, numbers


_trial = threading.local()
"""Has `runs` on a thread that runs a block to see what its router chooses."""


def look_ahead(model: nn.Module, names: Sequence[str]) -> None:
    """Let each of these modules of experts, in the order in which they run, guess which ones the next will need.

    The next one's block runs on this one's tokens, up to them.
    """
    # Those of a list are called one by one; the list may have a forward of its own, and a hook around it.
    stacked = [n for n in names if isinstance(model.get_submodule(n).__dict__.get("_old_forward"), _ChosenExperts)]
    for name, following in pairwise(stacked):
        block = model.get_submodule(following.rpartition(".")[0])
        block.register_forward_pre_hook(_note_form, with_kwargs=True)
        model.get_submodule(name).__dict__["_old_forward"].following = block


def _note_form(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    form = None  # what takes more than tokens cannot be run for a guess
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dim() > 1:
        form = args[0].dim(), args[0].shape[-1], args[0].dtype, args[0].device
    block.__dict__["_accel_form"] = form


def attach_stacked(
    module: nn.Module,
    name: str,
    device: torch.device,
    store: Mapping[str, torch.Tensor],
    cache: ExpertCache,
) -> None:
    """Put a hook on experts, and let their forward run the chosen ones alone."""
    hook = _ExpertsHook(device, True, weights_map=PrefixedDataset(store, f"{name}." if name else ""))
    add_hook_to_module(module, hook)
    chosen = _ChosenExperts(module, module.__dict__["_old_forward"], hook, cache, name)
    object.__setattr__(module, "_old_forward", chosen)


class _ChosenExperts(ExpertSource):
    """The forward of experts that are away: it runs each chosen one on the tokens that chose it.

    Sums are formed in the order of the experts' numbers, as transformers' own loop over experts forms them.
    """

    following: nn.Module | None = None

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., torch.Tensor],
        hook: AlignDevicesHook,
        cache: ExpertCache,
        name: str,
    ) -> None:
        self.module, self.forward, self.hook, self.cache, self.name = module, forward, hook, cache, name
        self.count: int = module.num_experts  # type: ignore[assignment]  # while one runs, the module has one
        update_wrapper(self, forward)

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Run the experts that tokens chose; compiled graphs are left meanwhile, for the experts are read."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        if getattr(_trial, "runs", False):
            raise _Chosen(self, inputs_by_place(self.forward, args, kwargs)[1])
        with self._residency.lock:  # two threads cannot have two experts stand in one module
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
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        left = deque(chosen)
        bring = partial(self.cache.bring, self, chosen, len(tokens), guess=partial(self._guess, tokens))
        # What those in the cache make waits for those before them, in no more memory than an expert takes.
        for number, brought in bring(present_first=tokens.nbytes * numbers.shape[-1] <= self.nbytes):
            choice, rows = torch.where((numbers == number).T)  # the order in which transformers' loop takes them
            parts = {slot.name: slot.wrapped(brought[slot.name]) for slot in self.slots}
            with _substituted(self.module, parts):
                part = self.forward(tokens[rows], torch.zeros_like(rows)[:, None], weights[rows, choice][:, None])
            made[number] = rows, part.to(output.dtype)
            while left and left[0] in made:
                output = output.index_add(0, *made.pop(left.popleft()))
        return output

    def _guess(self, tokens: torch.Tensor) -> Guess:
        """Return what the next block's router chooses for this one's tokens."""
        block = self.following
        form = None if block is None or block.training else block.__dict__.get("_accel_form")
        if block is None or form is None or form[1:] != (tokens.shape[-1], tokens.dtype, tokens.device):
            return None
        inputs = tokens.detach().clone().view(*(1,) * (form[0] - 2), *tokens.shape)
        _trial.runs = True
        try:
            with torch.no_grad():
                # In a context of its own: transformers collects routers' outputs in a variable of the context.
                contextvars.Context().run(type(block).forward, block, inputs)
        except _Chosen as choice:
            return choice.source, torch.unique(choice.numbers).tolist()
        finally:
            _trial.runs = False
        return None

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
    def waits(self) -> bool:
        """Whether weights are copied, or cast; otherwise the CPU computes with pages of files."""
        device = self.hook.device
        if device is None or device.type != "cpu":
            return True
        places = [(part, part.place) for part in self.parts()]
        return not all(at and part.dtype in (None, at[0].entries[at[1]].form) for part, at in places)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(
            form.nbytes(slot.placeholder) // self.count
            if (form := packed.find(slot.placeholder))
            else slot.shape[1:].numel() * slot.dtype.itemsize
            for slot in self.slots
        )

    def parts(self) -> Sequence[Part]:
        """Return the stacks that the experts are rows of."""
        self._residency.refresh()
        store, prefix = self._residency.source()
        found = []
        for slot in self.slots:
            if prefix + slot.name not in store:
                raise OffloadError(
                    f"An offloaded weight is not in its weights map; got no {prefix + slot.name!r} for {slot.name!r} "
                    f"of {self.name}. Pass a map that holds every tensor of the module."
                )
            weight = slot.placeholder if _has_rows(slot.placeholder) else None
            form = (slot.dtype, slot.shape, None) if weight is None else (None, weight.raw.shape, weight)
            found.append(Part(slot.name, store, prefix + slot.name, *form))
        return found

    def state(self) -> tuple[object, ...]:
        """Return what changes when weights were cast, moved, replaced or written to while they were away."""
        return (self.hook.device, *super().state())

    def made(self, number: int, part: Part, found: Brought) -> torch.Tensor:
        """Return one expert's row of a stack, which stays packed."""
        row = part.bring(number, self.hook.device, found)
        return row if part.weight is None else part.weight.row(row, (1, *part.weight.shape[1:]))


@contextmanager
def _substituted(module: nn.Module, parts: Mapping[str, torch.Tensor]) -> Iterator[None]:
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
