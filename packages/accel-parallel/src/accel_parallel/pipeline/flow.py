"""What the blocks of a model need of one another, found by one forward pass on tensors that have no memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from accel_core._records import record
from accel_core._torch import calls_of, enclose_calls, fake_errors, fake_mode
from accel_core.errors import PreparationError
from accel_core.modules.unwrap import canonical_name

Source: TypeAlias = "str | tuple[int, int] | Drawn"
"""Where values come from: a parameter outside of all blocks, by name; an output of a block, by its place there; or
random numbers."""

Call: TypeAlias = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is done where a block is called: its number, its own call, and the arguments."""

_CONSTANTS = (type(None), bool, int, float, str)

_DROPOUT = re.compile("bernoulli_.float|native_dropout|attention|rrelu")
"""Operators whose random numbers may be others on each stage."""


@cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


@record(frozen=True)
class Drawn:
    """Random numbers outside of all blocks."""

    operator: str
    number: int  # how many were drawn before


@record(frozen=True)
class Leaf:
    """A tensor that a block or a model returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def like(self, device: torch.device | str) -> torch.Tensor:
        """Return memory for such a tensor, which needs a gradient where it does."""
        return self.empty(device).requires_grad_(self.requires_grad)

    def placeholder(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this shape that has the memory of one element."""
        return _element(self.dtype, device).expand(self.shape)


@record(frozen=True)
class Outputs:
    """What a block, or the model, returns: how it is nested, a `Leaf` for each tensor, and constants as they are."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    def fits(self, result: object) -> bool:
        """Return whether a nest has tensors of these shapes and formats."""
        found = tree_leaves(result)
        return len(found) == len(self.leaves) and all(
            not isinstance(leaf, Leaf) or (tuple(value.shape), value.dtype) == (leaf.shape, leaf.dtype)
            for leaf, value in zip(self.leaves, found, strict=True)
        )

    def filled(self, tensor: Callable[[int, Leaf], torch.Tensor]) -> Any:
        """Return such a nest with tensors, made by the place of each and its `Leaf`."""
        made = [tensor(place, leaf) if isinstance(leaf, Leaf) else leaf for place, leaf in enumerate(self.leaves)]
        return tree_unflatten(made, self.structure)


@record(frozen=True)
class Flow:
    """What a forward pass computes from what.

    Attributes:
        needs: For each block, and last for what the model returns, the sources that are read there.
        outputs: For each block, and last for the model, what it returns.
    """

    needs: tuple[frozenset[Source], ...]
    outputs: tuple[Outputs, ...]

    def needed_inside(self, first: int, end: int) -> frozenset[Source]:
        """Return what the blocks from `first` to before `end` read."""
        return frozenset[Source]().union(*self.needs[first:end])

    def needed(self, first: int, end: int) -> frozenset[Source]:
        """Return what the blocks from `first` to before `end` read, and what the model returns if they are the last."""
        return self.needed_inside(first, end + (end == len(self.needs) - 1))

    def crossing(self, cut: int) -> tuple[tuple[int, int], ...]:
        """Return which outputs of the blocks before a cut are read by the blocks after it, or by the model's end."""
        read = (source for source in self.needed_inside(cut, len(self.needs)) if isinstance(source, tuple))
        return tuple(sorted(source for source in read if source[0] < cut))

    def leaf(self, source: tuple[int, int]) -> Leaf:
        """Return what an output of a block is like."""
        found: Leaf = self.outputs[source[0]].leaves[source[1]]
        return found


class _Stage:
    """What the calls of a block go through, so that a pipeline decides what a call does."""

    def __init__(self) -> None:
        self.number = 0  # of the block
        self.calls: list[Call] = []

    def __call__(self, plain: Callable[..., Any], *args: object, **kwargs: object) -> object:
        """Call the block, or what a pipeline does in its place."""
        return self.calls[-1](self.number, plain, args, kwargs) if self.calls else plain(*args, **kwargs)


def stage_in(blocks: list[nn.Module]) -> list[Call]:
    """Let what is last in the list that this returns stand in for calls of the blocks; in an empty one, nothing does.

    What recomputes a block, compiles it or hooks on it is inside of such a call.
    """
    calls: list[Call] = []
    for number, block in enumerate(blocks):
        functions = (getattr(each, "func", None) for each in calls_of(block))
        stage = next((each for each in functions if isinstance(each, _Stage)), None)
        if stage is None:
            stage = _Stage()
            enclose_calls(block, stage)
        stage.number, stage.calls = number, calls
    return calls


@record(frozen=True)
class _Inside:
    """The source of what a block makes and does not return."""

    block: int


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what is equal for tensors that look into the same memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@record
class _Tracer:
    """Follows what is computed from what."""

    names: list[str]  # of the blocks
    modules: list[nn.Module]
    device: torch.device
    sources: dict[StorageWeakRef, set[Any]] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)  # so that no other tensor gets the memory of one of these
    needs: list[set[Any]] = field(default_factory=list)
    outputs: list[Outputs] = field(default_factory=list)
    inside: int | None = None
    drawn: int = 0

    def draw(self, operator: str) -> Drawn:
        """Return the source of random numbers."""
        self.drawn += 1
        return Drawn(operator, self.drawn)

    def of(self, value: object) -> set[Any]:
        """Return the sources of a tensor; memory has them, so that views share them."""
        if not isinstance(value, torch.Tensor):
            return set()
        return self.sources.get(_memory(value), set())

    def mark(self, tensor: torch.Tensor, sources: set[Any]) -> torch.Tensor:
        """Add sources to a tensor."""
        self.kept.append(tensor)
        self.sources.setdefault(_memory(tensor), set()).update(sources)
        return tensor

    def read(self, values: object) -> set[Any]:
        """Return the sources of a nest of tensors that is read where the pass is now."""
        found = set[Any]().union(*map(self.of, tree_leaves(values)))
        foreign = sorted({each.block for each in found if isinstance(each, _Inside)} - {self.inside})
        if foreign:
            raise PreparationError(
                "What one block of a pipeline hands to another has to be among the values that it returns; got a "
                f"tensor that {self.names[foreign[0]]} keeps or records, and that is read elsewhere. Leave out what "
                "collects it, such as output_hidden_states, output_attentions or output_router_logits."
            )
        return found

    def call(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run one block, and return tensors that have nothing but its outputs as sources."""
        if number != len(self.outputs) or self.inside is not None:
            raise PreparationError(
                f"The blocks of a pipeline are called once each, in the order in which the model lists them; got "
                f"{self.names[number]} after {len(self.outputs)} of {len(self.names)} blocks. Such a model is not cut "
                "into stages."
            )
        self.inside = number
        self.needs.append(set())
        # Not by `plain`: what hooks on a block, or compiles it, has no place in a pass without memory.
        result = self.modules[number].forward(*args, **kwargs)
        self.needs[-1] |= self.read(result) - {_Inside(number)}
        self.inside = None
        self.outputs.append(_outputs(result, self.names[number]))
        return self.outputs[-1].filled(lambda place, leaf: self._fresh(leaf, (number, place)))

    def _fresh(self, leaf: Leaf, source: Source) -> torch.Tensor:
        return self.mark(leaf.like(self.device), {source})


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of each operation the sources of what it reads."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        tracer = self._tracer
        found = tracer.read((args, kwargs))
        if func is torch.ops.aten._grouped_mm.default and args[1].dim() == 3:
            # Products of experts, of which torch 2.13 knows no shape without values but in bf16.
            result = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        made = set(found)
        if torch.Tag.nondeterministic_seeded in func.tags and tracer.inside is None:
            made |= set() if _DROPOUT.search(str(func)) else {tracer.draw(str(func))}
        if tracer.inside is not None:
            own = _Inside(tracer.inside)
            tracer.needs[-1] |= found - {own}
            made |= {own}
        if made:
            given = {_memory(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            new = [
                each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and _memory(each) not in given
            ]
            for tensor in tree_leaves((new, written)):
                tracer.mark(tensor, made)
        return result


def _outputs(result: object, name: str) -> Outputs:
    """Describe what a block or a model returns: tensors and constants."""
    leaves, structure = tree_flatten(result)
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described.append(Leaf(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, _CONSTANTS):
            described.append(leaf)
        elif "Cache" in type(leaf).__name__:
            described.append(None)  # of keys and values, which no training step reads again
        else:
            raise PreparationError(
                f"What blocks hand on in a pipeline is tensors, in tuples, lists and dicts; got a "
                f"{type(leaf).__name__} from {name}. Return the tensors in it."
            )
    return Outputs(structure, tuple(described))


def trace(
    model: nn.Module,
    forward: Callable[..., Any],
    blocks: Mapping[str, nn.Module],
    calls: list[Call],
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
) -> Flow:
    """Run a forward pass on tensors without memory, and return what is computed from what.

    `calls` is what `stage_in` returned for the blocks; the model's parameters are exchanged for the length of the pass.

    Raises:
        PreparationError: A block is not called, or twice; it hands on something that cannot be sent; or what the model
            computes depends on values of tensors.
    """
    tracer = _Tracer([*blocks], [*blocks.values()], device)
    with fake_mode(), _exchanged(model, blocks, tracer), torch.random.fork_rng(devices=[]):
        args, kwargs = tree_map_only(torch.Tensor, partial(_unfilled, device=device), batch)
        calls.append(tracer.call)
        try:
            with _Following(tracer):
                result = forward(*args, **kwargs)
            _refuse_kept(model, blocks, tracer)
        except fake_errors() as error:
            raise PreparationError(
                "Which operations a pipeline runs may not depend on values of tensors, which other stages have; got "
                f"{type(model).__name__}, which reads one: {error}. Use a branch that depends on shapes, or another "
                "parallelism."
            ) from error
        finally:
            calls.remove(tracer.call)
        end = tracer.read(result)
    missing = tracer.names[len(tracer.outputs) :]
    if missing:
        raise PreparationError(
            f"Each block of a pipeline takes part in every pass; got {', '.join(missing)}, which no call reached. Such "
            "a model is not cut into stages."
        )
    whole = _outputs(result, type(model).__name__)
    if not any(isinstance(leaf, Leaf) for leaf in whole.leaves):
        raise PreparationError(
            f"The last stage of a pipeline returns tensors, in tuples, lists and dicts; got {type(result).__name__} "
            f"from {type(model).__name__}. Return such a nest."
        )
    return Flow(tuple(map(frozenset, [*tracer.needs, end])), (*tracer.outputs, whole))


def _refuse_kept(model: nn.Module, blocks: Mapping[str, nn.Module], tracer: _Tracer) -> None:
    """Refuse buffers outside of blocks that keep what blocks computed: one stage alone would have it."""
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    outside = {name: module for name, module in model.named_modules() if id(module) not in inside}
    named = {f"{name}.{own}": buffer for name, module in outside.items() for own, buffer in module._buffers.items()}
    for name, buffer in named.items():
        if any(isinstance(source, tuple) for source in tracer.of(buffer)):
            raise PreparationError(
                "A buffer outside of the blocks of a pipeline is the same on all ranks; got "
                f"{name.lstrip('.')}, in which forward keeps what blocks computed. Return it and keep it after "
                "the call, or use another parallelism."
            )


def _unfilled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(tensor.requires_grad)


@contextmanager
def _exchanged(model: nn.Module, blocks: Mapping[str, nn.Module], tracer: _Tracer) -> Iterator[None]:
    """Exchange the parameters and buffers of a model for such without memory, with their sources.

    Hooks stay away: they may read values, and do not lead values from block to block.
    """
    hooks = [(module, module._forward_hooks, module._forward_pre_hooks) for module in model.modules()]
    inside = {id(part): _Inside(number) for number, block in enumerate(blocks.values()) for part in block.modules()}
    stores: list[tuple[nn.Module, dict[str, Any]]]
    stores = [(module, store) for module in model.modules() for store in (module._parameters, module._buffers)]
    before = [dict(store) for _, store in stores]
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    made: dict[int, torch.Tensor] = {}
    try:
        for module, *_ in hooks:
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        for module, store in stores:
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _unfilled(tensor, tracer.device)
                    source = inside.get(id(module)) or names.get(id(tensor))
                    tracer.mark(made[id(tensor)], set() if source is None else {source})
                store[name] = made[id(tensor)]
        yield
    finally:
        for module, after, ahead in hooks:
            module._forward_hooks, module._forward_pre_hooks = after, ahead
        for (_, store), given in zip(stores, before, strict=True):
            store.update(given)
