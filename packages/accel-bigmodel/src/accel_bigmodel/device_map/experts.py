"""Experts that come one by one: where a device map leaves them."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import convert_file_size_to_int, written_size

Device = int | str


def refuse_small_cache(size: int | str, budget: int, one: int) -> None:
    """Refuse a cache that has no room for the largest expert."""
    if budget < one:
        raise ConfigurationError(
            f"A cache of experts holds at least one; got expert_cache={size!r}, and {written_size(one)} in the largest "
            "expert. Raise expert_cache."
        )


def room_for_cache(size: int | str, limits: Mapping[Device, int]) -> dict[Device, int]:
    """Return how many bytes a cache takes of which accelerator; nothing where the CPU computes with pages of files.

    Raises:
        ConfigurationError: The cache is larger than the limit of its device.
    """
    budget = convert_file_size_to_int(size)
    main = next((device for device, limit in limits.items() if device not in ("cpu", "disk") and limit), None)
    if main is None:
        return {}
    if budget > limits[main]:
        raise ConfigurationError(
            f"A cache of experts has to fit its device; got expert_cache={size!r} for device {main}, of which "
            f"{written_size(limits[main])} may be used. Lower expert_cache."
        )
    return {main: budget}


def with_experts_on_disk(
    model: nn.Module, name: str, device: int | str, experts: Collection[str]
) -> Iterator[tuple[str, int | str]]:
    """Yield an entry of a device map with the experts below it on the disk; a map gives each tensor one place."""
    below = f"{name}." if name else ""
    if name in experts:
        yield name, "disk"
    elif not any(each.startswith(below) for each in experts):
        yield name, device
    else:
        module = model.get_submodule(name)
        for own in (*module._parameters, *module._buffers):
            yield below + own, device
        for child, _ in module.named_children():
            yield from with_experts_on_disk(model, below + child, device, experts)


@contextmanager
def without(modules: Collection[nn.Module]) -> Iterator[None]:
    """Let modules have empty parameters for a while."""
    before = [(module, module._parameters.copy()) for whole in modules for module in whole.modules()]
    for module, own in before:
        for name, parameter in own.items():
            if parameter is not None:
                empty = torch.empty(0, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    try:
        yield
    finally:
        for module, own in before:
            module._parameters.update(own)
