"""Experts that come one by one: where a device map leaves them, and what a token costs."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import convert_file_size_to_int, written_size

__all__ = ["ExpertShare", "choices_of", "refuse_small_cache", "room_for_cache", "with_experts_on_disk", "without"]

Device = int | str


@record(frozen=True)
class ExpertShare:
    """What the experts of a plan cost.

    Attributes:
        budget: Bytes of the cache.
        dense: Bytes of everything else.
        nbytes: Bytes of all experts.
        count: How many there are.
        one: Bytes of the largest one.
        token: Bytes of those that work on a token; None where the model does not say how many these are.
    """

    budget: int
    dense: int
    nbytes: int
    count: int
    one: int
    token: int | None

    def explain(self) -> str:
        """Return in words what a token costs, in bytes that are brought."""
        held = min(self.budget / self.nbytes, 1)
        words = (
            f"{written_size(self.dense)} are dense; {self.count} experts of up to {written_size(self.one)} take "
            f"{written_size(self.nbytes)}, of which a cache of {written_size(self.budget)} holds {held:.0%}."
        )
        if self.token is None:
            return f"{words} The model does not say how many experts work on a token (num_experts_per_tok)."
        # Experts that are used alike are found as often as they are held; those of the last token cost nothing again.
        shares = ", ".join(f"{share:.0%}: {written_size(int((1 - share) * self.token))}" for share in (0.25, 0.5, 0.75))
        best = "nothing" if self.budget >= self.token else written_size(self.token - self.budget)
        return (
            f"{words} A token brings {written_size(self.token)} while the cache is empty, "
            f"{written_size(int((1 - held) * self.token))} once it is full if all experts are used alike, and {best} "
            f"if the last token's serve again. By the share that the cache holds, used alike: {shares}."
        )


def choices_of(model: nn.Module) -> int | None:
    """Return how many experts work on a token in each layer, as transformers' configurations say it."""
    config = getattr(model, "config", None)
    found = getattr(getattr(config, "text_config", config), "num_experts_per_tok", None)
    return found if isinstance(found, int) else None


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
