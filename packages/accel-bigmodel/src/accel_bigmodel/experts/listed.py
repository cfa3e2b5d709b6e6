"""Experts that are modules in a list: loads each expert when it is called, through the cache of experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.experts.cache import ExpertCache
from accel_bigmodel.experts.source import Brought, ExpertSource, Part
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset


def are_listed(name: str, module: nn.Module) -> bool:
    """Return whether a module is a list of experts, by its name."""
    return isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module) > 1


def attach_listed(
    experts: nn.Module,
    name: str,
    device: torch.device,
    store: OffloadedWeightsLoader,
    cache: ExpertCache,
    skip_keys: str | list[str] | None,
) -> None:
    """Put a hook on each expert of a list."""
    count = len(list(experts.children()))
    for number, expert in enumerate(experts.children()):
        weights = PrefixedDataset(_CachedWeights(store, cache, name, number, count, device), f"{name}.{number}.")
        hook = _ListedHook(device, True, weights_map=weights, place_submodules=True, skip_keys=skip_keys)
        add_hook_to_module(expert, hook, append=True)


class _CachedWeights(OffloadedWeightsLoader, ExpertSource):
    """The weights of one expert of a list, packed ones as their parts, which come from a cache."""

    waits = False
    """A list's experts are called one by one: none computes while another one comes."""

    def __init__(
        self,
        store: OffloadedWeightsLoader,
        cache: ExpertCache,
        name: str,
        number: int,
        count: int,
        device: torch.device,
    ) -> None:
        self.__dict__.update(store.__dict__)  # what is written to a weight is kept in the store, for all to see
        self.cache, self.name, self.number, self.count = cache, name, number, count
        self.device_of_expert = device
        self.begins = False  # whether a forward does, which the report counts
        own = [key for key in self.all_keys if key.startswith(f"{name}.{number}.")]
        self._parts = {key: Part(key, store, key, self.dtype_of(key)) for key in own}

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a weight, or a part of a packed one, on the device that computes."""
        if key not in self._parts:
            return super().__getitem__(key)
        begins, self.begins = self.begins, False
        entry = None if begins else self.cache.look_up((self.name, self.number), self.state())
        if entry is not None:
            return entry.brought.weights[key]
        [(_, weights)] = self.cache.bring(self, [self.number], 0)
        return weights[key]

    def parts(self) -> Sequence[Part]:
        """Return the expert's own weights."""
        return list(self._parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the expert as it is stored."""
        places = [(part, part.place) for part in self.parts()]
        return sum(part.stored.nbytes if at is None else at[0].entries[at[1]].nbytes for part, at in places)

    def made(self, number: int, part: Part, found: Brought) -> torch.Tensor:
        """Return a weight: the file's pages where the CPU computes."""
        made = part.bring(None, self.device_of_expert, found)
        made.__dict__.setdefault("is_piece", True)  # of a copy: the cache holds it, and nothing else
        return made


class _ListedHook(AlignDevicesHook):
    """Brings an expert of a list through the cache."""

    is_prefetched = False

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the expert, and move its inputs."""
        self.weights_map.dataset.begins = True  # type: ignore[union-attr]
        return super().enter_forward(module, *args, **kwargs)
