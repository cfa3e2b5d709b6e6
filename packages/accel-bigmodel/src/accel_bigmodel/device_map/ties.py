"""Tied parameters in the placing of modules by name, for libraries that place models themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from accel_core.errors import DeviceMapError
from accel_core.modules.sizes import convert_file_size_to_int

__all__ = ["check_tied_parameters_in_config", "fallback_allocate", "get_module_size_with_ties"]

NamedModules = list[tuple[str, nn.Module]]


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Tell whether a transformers model's configuration ties embeddings.

    Args:
        model: The model.

    Returns:
        True when its class ties weights and its configuration, or its decoder's, asks for it.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "tie_weights"):
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    ties_words = embeddings is not None and bool(getattr(text, "tie_word_embeddings", False))
    return ties_words or (
        bool(getattr(config, "tie_encoder_decoder", False)) and bool(getattr(config, "is_encoder_decoder", False))
    )


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: NamedModules
) -> tuple[int, list[str], list[nn.Module]]:
    """Count a module's bytes together with the modules that share parameters with it.

    Args:
        tied_params: Names of the shared parameters in the other modules.
        module_size: The module's own bytes.
        module_sizes: Bytes by name.
        modules_to_treat: The modules that wait for a place.

    Returns:
        The bytes of all of them, the others' names, and the others.

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
                f"A tied parameter is in none of the modules that wait for a place. Found {parameter!r}, waiting "
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

    Args:
        modules: The modules that wait for a place.
        module_sizes: Bytes by name.
        size_limit: Bytes or a written size.
        no_split_module_classes: Class names of modules that are not looked into.
        tied_parameters: Groups of tied names; a module that shares some with another one is not chosen.

    Returns:
        The name and module found, None when nothing fits, and the modules that still wait: of a module that the
        find was taken out of, the rest.
    """
    limit = convert_file_size_to_int(size_limit)
    whole = (
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
            if not isinstance(module, nn.Module) or type(module).__name__ in whole or not list(module.children()):
                continue
            parts: list[Any] = [*module.named_parameters(recurse=False), *module.named_children()]
            found, value, rest = take([(f"{name}.{key}", part) for key, part in parts])
            if found is not None:
                return found, value, entries[:number] + rest + entries[number + 1 :]
        return None, None, entries

    return take(list(modules))
