"""Tied parameters in the placing of modules: those a model declares, and groups for libraries that place by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_core.errors import DeviceMapError
from accel_core.modules.sizes import convert_file_size_to_int

NamedModules = list[tuple[str, nn.Module]]


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a transformers model's class ties weights and its configuration, or its decoder's, asks for it."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "tie_weights"):
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    ties_words = embeddings is not None and bool(getattr(text, "tie_word_embeddings", False))
    return ties_words or (
        bool(getattr(config, "tie_encoder_decoder", False)) and bool(getattr(config, "is_encoder_decoder", False))
    )


def declares_ties(module: nn.Module) -> bool:
    """Return whether a module names tensors that are tied."""
    own = module.__dict__.get("_tied_weights_keys", getattr(type(module), "_tied_weights_keys", None))
    return bool(own)


def declared_ties(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """List the groups of names that a module declares to be one tensor, whether or not they already are.

    `_tied_weights_keys` is a mapping from names to the names they are tied to, or a list of names. Each is a regular
    expression that matches the name of a tensor, or of a module: then the tensors of the same names below are tied.
    What an expression of a list matches is tied with each other, or, if it is one tensor, with the input embeddings.
    Where a transformers model has worked out `all_tied_weights_keys`, that is used; where its configuration ties
    nothing, nothing is tied. Only tensors of one shape and dtype are.

    Raises:
        DeviceMapError: When an expression is none.
    """
    worked_out = module.__dict__.get("all_tied_weights_keys")
    if isinstance(worked_out, Mapping):
        groups: list[list[str]] = [[source, target] for target, source in worked_out.items()]
    elif getattr(module, "config", None) is not None and not check_tied_parameters_in_config(module):
        return []
    else:
        keys: Any = module._tied_weights_keys
        if isinstance(keys, Mapping):
            groups = [group for target, source in keys.items() for group in _paired(target, source, tensors)]
        else:
            groups = _listed([keys] if isinstance(keys, str) else keys, tensors, _embeddings(module, tensors))
    equal = ([name for name in dict.fromkeys(group) if _equal(tensors, group[0], name)] for group in groups)
    return [group for group in equal if len(group) > 1]


def _equal(tensors: Mapping[str, torch.Tensor], first: str, second: str) -> bool:
    one, other = tensors.get(first), tensors.get(second)
    return one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype


def _matches(pattern: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Pair the names that an expression matches, up to the end of a part, with what follows."""
    try:
        compiled = re.compile(f"(?:{pattern})(?=\\.|$)")
    except re.error as failure:
        raise DeviceMapError(
            f"`_tied_weights_keys` holds regular expressions; got {pattern!r}: {failure}. Correct it."
        ) from failure
    found = ((name, compiled.match(name)) for name in names)
    return [(name, name[match.end() :]) for name, match in found if match is not None]


def _paired(target: str, source: str, names: Iterable[str]) -> list[list[str]]:
    sources = {rest: name for name, rest in reversed(_matches(source, names))}  # the first match counts
    return [[sources[rest], name] for name, rest in _matches(target, names) if rest in sources]


def _listed(patterns: Iterable[str], names: Iterable[str], embeddings: str | None) -> list[list[str]]:
    groups = []
    for pattern in patterns:
        by_rest: dict[str, list[str]] = {}
        for name, rest in _matches(pattern, names):
            by_rest.setdefault(rest, []).append(name)
        groups += [
            [embeddings, *group] if len(group) == 1 and embeddings is not None else group for group in by_rest.values()
        ]
    return groups


def _embeddings(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the weight of the input embeddings of a transformers model."""
    ask: Any = getattr(module, "get_input_embeddings", None)
    try:
        weight = getattr(ask(), "weight", None) if callable(ask) else None
    except NotImplementedError:  # this is how a model says that it has none
        return None
    return next((name for name, tensor in tensors.items() if tensor is weight), None)


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: NamedModules
) -> tuple[int, list[str], list[nn.Module]]:
    """Count a module's bytes together with the modules that share parameters with it; these are returned too.

    Raises:
        DeviceMapError: When no waiting module holds one of the parameters.
    """
    total, names, modules = module_size, [], []
    for parameter in tied_params:
        found = next(
            ((name, module) for name, module in modules_to_treat if f"{parameter}.".startswith(f"{name}.")), None
        )
        if found is None:
            raise DeviceMapError(
                f"A tied parameter is in none of the modules that are still to be placed; got {parameter!r} for "
                f"{[name for name, _ in modules_to_treat]}. Place tied modules together."
            )
        total += module_sizes.get(found[0], 0) - module_sizes.get(parameter, 0)
        if found[0] not in names:
            names.append(found[0])
            modules.append(found[1])
    return total, names, modules


def fallback_allocate(
    modules: NamedModules,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, NamedModules]:
    """Find the first module or tensor that fits into a number of bytes, looking into modules that do not.

    A module is not chosen that shares tied parameters with another one. What still waits is returned after the
    find, without it: of the module that it was taken out of, the rest.
    """
    limit = convert_file_size_to_int(size_limit)
    no_split = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes or ())
    )

    def torn(name: str) -> bool:
        for group in tied_parameters or ():
            inside = [parameter == name or parameter.startswith(f"{name}.") for parameter in group]
            if any(inside) and not all(inside):
                return True
        return False

    def take(entries: NamedModules) -> tuple[str | None, Any, NamedModules]:
        for number, (name, module) in enumerate(entries):
            if module_sizes.get(name, 0) <= limit and not torn(name):
                return name, module, entries[:number] + entries[number + 1 :]
            if not isinstance(module, nn.Module) or type(module).__name__ in no_split or not list(module.children()):
                continue
            parts: list[Any] = [*module.named_parameters(recurse=False), *module.named_children()]
            found, value, rest = take([(f"{name}.{key}", part) for key, part in parts])
            if found is not None:
                return found, value, entries[:number] + rest + entries[number + 1 :]
        return None, None, entries

    return take(list(modules))
