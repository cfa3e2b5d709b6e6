"""Models that are made without memory, and get their first values where each rank holds its part of them."""

from __future__ import annotations

import functools
import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from accel_core.errors import PreparationError
from accel_core.mesh.tensor import is_spread, local_parts
from accel_core.modules.unwrap import canonical_name

_MARK = "_accel_empty_init"
_SHOWN = 8
_INITIALIZERS = ("reset_parameters", "_reset_parameters")
"""Methods by which a module gives its own tensors their first values."""
_OF_OTHERS = "_init_weights"
"""The method by which a model, as those of transformers, gives them to a module inside of it."""
_KNOWN = {*_INITIALIZERS, _OF_OTHERS, "init_weights", "initialize_weights", "_apply"}


@contextmanager
def empty_init(seed: int) -> Iterator[None]:
    """Let modules that this thread makes have parameters and buffers without memory; `prepare` makes their values.

    Raises:
        PreparationError: A module reads a value, or writes one outside of its `reset_parameters`.
    """
    thread = threading.get_ident()

    def mark(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.is_meta and threading.get_ident() == thread:
            module.__dict__[_MARK] = seed  # a copy of the module has it too

    handle = register_module_parameter_registration_hook(mark)
    try:
        with torch.device("meta"), _Writes():
            yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, PreparationError) or "meta" not in str(error):
            raise
        raise _refused(f"a module that reads a value: {error}".partition("\n")[0].rstrip(".")) from error
    finally:
        handle.remove()


class _Writes(TorchFunctionMode):
    """Refuses what writes values into parameters where `initialize` would not write them again."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith(("__", "requires_grad_"))
        writes = writes or name == "__setitem__" or func == Tensor.data.__set__  # type: ignore[attr-defined]
        if writes and isinstance(first, Tensor) and (isinstance(first, nn.Parameter) or hasattr(first, _MARK)):
            _refuse_lost(name)
        result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__get__ and isinstance(first, nn.Parameter):  # type: ignore[attr-defined]
            setattr(result, _MARK, True)
        return result


def _refuse_lost(operation: str) -> None:
    """Refuse a write to a parameter outside of what makes values."""
    if _KNOWN.isdisjoint(frame.f_code.co_name for frame, _ in traceback.walk_stack(None)):
        raise _refused(f"a module that writes a parameter by {operation}")


def _refused(what: str) -> PreparationError:
    return PreparationError(
        f"A module under empty_init has no values before prepare(); got {what}. Move that to its "
        "reset_parameters(), or make the model outside of empty_init()."
    )


def seed_of(model: nn.Module) -> int | None:
    """Return the seed of a model that was made under `empty_init` and has no values yet; else none."""
    marked = (vars(each)[_MARK] for each in model.modules() if _MARK in vars(each))
    return next(marked, None) if any(each.is_meta for each in model.parameters()) else None


def refuse_empty_init(model: nn.Module) -> None:
    """Refuse a model without values where the way to train gives it none."""
    if seed_of(model) is not None:
        raise PreparationError(
            f"This way to train, or a placement by hand, does not initialize a model; got {type(model).__name__}, made "
            "under empty_init(). Make it without."
        )


def check(model: nn.Module) -> None:
    """Refuse a model some of whose values nobody would make; nothing is changed.

    Raises:
        PreparationError: No module makes the values of a tensor, or a parameter has some.
    """
    real = [name for name, each in model.named_parameters() if not each.is_meta]
    if real:
        raise PreparationError(
            "A model that was made under empty_init() has no values before prepare(); got some in "
            f"{_listed(real)}. Add these parameters after prepare(), or make the model outside of empty_init()."
        )
    modules = dict(model.named_modules())
    lacking = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in modules.items()
        if any(True for _ in _own(module)) and not any(True for _ in _initializers(modules, name))
    ]
    if lacking:
        raise PreparationError(_lacks(lacking))


@torch.no_grad()
def initialize(
    model: nn.Module,
    device: torch.device,
    kept: torch.device | None = None,
    holds: Callable[[Tensor], bool] = lambda _: True,
) -> None:
    """Give a model its memory and first values: of each module whole, one after the other, and kept as it is spread.

    Random numbers depend on the seed, and on the names of the module and of what initializes it, so they are the same
    on every rank. Modules that hold others are asked once for each of these, which alone has memory meanwhile. What is
    not held here (`holds`) stays without memory.

    Raises:
        PreparationError: Tensors were left without values.
    """
    seed, modules = seed_of(model), dict(model.named_modules())
    places = {name: list(_own(module)) for name, module in modules.items()}
    tensors = {id(tensor): tensor for here in places.values() for *_, tensor in here}
    made = {
        key: _like(each, torch.empty_like(each, device=kept or device)) if holds(each) else each
        for key, each in tensors.items()
    }
    empty = {
        key: _like(each, torch.empty(each.shape, dtype=each.dtype, device="meta")) for key, each in tensors.items()
    }
    _exchange(places, empty)
    left: list[str] = []
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_kind_of(device)):
        for name, here in places.items():
            # Where a tensor is tied, its first name counts.
            new = [
                (into, own, made[id(tensor)]) for into, own, tensor in here if tensors.pop(id(tensor), None) is not None
            ]
            run = [(f"{seed} {name} {label}", method) for label, method in _initializers(modules, name)]
            left += [f"{name}.{own}".lstrip(".") for own in _fill(new, run, device)]
            _exchange({name: here}, empty)
    _exchange(places, made)
    for module in modules.values():
        module.__dict__.pop(_MARK, None)
    if left:
        raise PreparationError(_lacks(left))


_Place = tuple[dict[str, Any], str, Tensor]
"""A module's own parameters or buffers, a name in them, and what it stands for."""


def _fill(here: list[_Place], run: list[tuple[str, Callable[[], Any]]], device: torch.device) -> Iterator[str]:
    """Give the tensors of one module their values, by initializers with their seeds; yield the names that got none."""
    if all(held.is_meta for *_, held in here):
        return
    before: dict[str, tuple[Tensor, int]] = {}
    for into, own, held in here:
        elsewhere = held.device != device or is_spread(held)
        whole = _like(held, torch.empty(held.shape, dtype=held.dtype, device=device)) if elsewhere else held
        if whole.is_floating_point():
            whole.fill_(torch.nan)
        before[own] = whole, whole._version
        into[own] = whole
    # The other seeds every device of the process, whose numbers go on as if nothing had been drawn.
    seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    for label, method in run:
        seed(int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big"))
        method()
    for into, own, held in here:
        now, (whole, version) = into[own], before[own]
        lost = bool(now.sum().isnan()) if now.is_floating_point() else now is whole and now._version == version
        if lost and now.numel():
            yield own
        if now is not held and not held.is_meta:
            for (starts, lengths), part in local_parts(held):
                box = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
                part.copy_(now[box])


def _initializers(modules: dict[str, nn.Module], name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what gives a module its values, with a name: its own methods, and those of the modules that it is in.

    Inner modules come first, as they are made. Then a model gives values to modules in it, as those of transformers do.
    """
    chain = [name]
    while chain[-1]:
        chain.append(chain[-1].rpartition(".")[0])
    inner = [(canonical_name(each), modules[each]) for each in chain]
    for at, module in inner:
        method = next(filter(callable, (getattr(module, one, None) for one in _INITIALIZERS)), None)
        if method is not None:
            yield at, method
    for place, (at, module) in enumerate(inner):
        owner = next((each for _, each in inner[place:] if callable(getattr(each, _OF_OTHERS, None))), None)
        if owner is not None:
            yield f"{at} {_OF_OTHERS}", functools.partial(getattr(owner, _OF_OTHERS), module)


def _own(module: nn.Module) -> Iterator[_Place]:
    """Yield the tensors of a module itself that have no memory, and where they are."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, own, each) for own, each in tensors.items() if each is not None and each.is_meta)


def _exchange(places: dict[str, list[_Place]], others: dict[int, Tensor]) -> None:
    """Put other tensors where some were."""
    for here in places.values():
        for into, own, tensor in here:
            into[own] = others[id(tensor)]


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    """Return what was made as a parameter, if it takes the place of one."""
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # what libraries note on parameters
    return parameter


def _kind_of(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # which is not asked where there are no devices


def _lacks(names: list[str]) -> str:
    return (
        f"A model that was made under empty_init() gets its values from reset_parameters() and _init_weights(); got "
        f"none for {_listed(names)}. Write a reset_parameters() for these modules, or make the model without."
    )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
