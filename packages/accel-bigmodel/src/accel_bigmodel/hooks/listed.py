"""Experts that are modules in a list: each comes whole when it is called, through the cache of experts."""

from functools import partial
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.offload.experts import Brought, ExpertCache, call_all
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import normal_tensors

__all__ = ["CachedWeights", "ListedHook", "are_listed"]


def are_listed(name: str, module: nn.Module) -> bool:
    """Return whether a module is a list of experts, by its name."""
    return isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module) > 1


class CachedWeights(OffloadedWeightsLoader):
    """The weights of one expert of a list, packed ones as their parts, which come from a cache."""

    def __init__(
        self,
        store: OffloadedWeightsLoader,
        cache: ExpertCache,
        name: str,
        number: int,
        experts: nn.ModuleList,
        device: torch.device,
    ) -> None:
        self.__dict__.update(store.__dict__)  # what is written to a weight is kept in the store, for all to see
        self.cache, self.name, self.number, self.count = cache, name, number, len(experts)
        self.device_of_expert = device
        self.begins = False  # whether a forward does, which the report counts
        self.keys_of_expert = [key for key in store.all_keys if key.startswith(f"{name}.{number}.")]

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a weight, or a part of a packed one, on the device that computes."""
        if key not in self.keys_of_expert:
            return super().__getitem__(key)
        state = self.state()
        begins, self.begins = self.begins, False
        entry = None if begins else self.cache.look_up((self.name, self.number), state)
        if entry is not None:
            return entry.brought.weights[key]
        bringing = self.cache.bring(self, [self.number], 0)
        try:
            return next(bringing)[1][key]
        finally:
            bringing.close()  # type: ignore[attr-defined]  # an iterator for its readers, a generator here

    waits = False
    """A list's experts are called one by one: none computes while another one comes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the expert as it is stored."""
        places = [(key, None if key in self.state_dict else self.file_of(key)) for key in self.keys_of_expert]
        return sum(self.stored(key).nbytes if at is None else at[0].entries[at[1]].nbytes for key, at in places)

    def state(self) -> tuple[object, ...]:
        """Return what changes when weights were replaced or written to while they were away."""
        found: list[object] = []
        for key in self.keys_of_expert:
            place = None if key in self.state_dict else self.file_of(key)
            stored = self.stored(key) if place is None else None
            if place is not None:
                place[0].check()
                found += [place, place[0].writes(place[1])]
            else:
                assert stored is not None
                found += [stored, None if stored.is_inference() else stored._version]
        return tuple(found)

    def read(self, number: int) -> Brought:
        """Return the expert's weights: pages of files where the CPU computes."""
        found = Brought({}, in_pages=self.device_of_expert.type == "cpu")
        pages = []
        for key in self.keys_of_expert:
            place = None if key in self.state_dict else self.file_of(key)
            if place is not None:
                place[0].will_need(place[1])
            stored, wanted = self.stored(key), self.dtype_of(key)
            with normal_tensors():
                made = stored.to(self.device_of_expert, wanted or stored.dtype)
            if place is None:
                found.from_host += stored.nbytes
                found.in_pages = False
            else:
                found.from_disk += stored.nbytes
                pages.append(partial(place[0].done_with, place[1]))
                found.in_pages = found.in_pages and made is stored
            if made is not stored:
                made.__dict__["is_piece"] = True  # the cache holds it, and nothing else
            found.weights[key] = made
        if found.in_pages:
            found.release = partial(call_all, pages)
        return found


class ListedHook(AlignDevicesHook):
    """Brings an expert of a list through the cache."""

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the expert, and move its inputs."""
        assert isinstance(self.weights_map, PrefixedDataset)
        assert isinstance(self.weights_map.dataset, CachedWeights)
        self.weights_map.dataset.begins = True
        return super().enter_forward(module, *args, **kwargs)
