"""Puts schedules on a dispatched model, so that offloaded weights are prefetched while other blocks compute."""

import functools
from collections.abc import Iterator

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import SequentialHook
from accel_bigmodel.hooks.residency import PrefetchBinding, Residency, residencies_of
from accel_bigmodel.memory import accelerator_module
from accel_bigmodel.offload.prefetch import MapTransport, StreamTransport, TransferSpec, Weights
from accel_bigmodel.offload.schedule import Block, Schedule, Transport
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_core.modules import packed
from accel_core.modules.sizes import convert_file_size_to_int

__all__ = ["Prefetch", "attach_prefetch"]

Prefetch = bool | int | str | None
_LEAST_WINDOW = 64 * 2**20


def attach_prefetch(
    model: nn.Module, prefetch: Prefetch = None, keep_pages: bool | None = None
) -> tuple[Schedule[Weights], ...]:
    """Prefetch the offloaded weights of a dispatched model."""
    if prefetch is False:
        return ()
    groups: dict[torch.device, list[tuple[Residency, AlignDevicesHook, OffloadedWeightsLoader, str]]] = {}
    for residency, hook in _residencies(model):
        found = _store_of(residency, hook)
        device = hook.device
        if found is not None and device is not None:
            groups.setdefault(device, []).append((residency, hook, *found))
    schedules = []
    for device, members in groups.items():
        blocks = []
        for residency, hook, store, prefix in members:
            spec = TransferSpec(
                [prefix + slot.name for slot in residency.slots],
                [slot.placeholder.dtype for slot in residency.slots],
                store,
            )
            count = sum(slot.placeholder.numel() * slot.placeholder.dtype.itemsize for slot in residency.slots)
            blocks.append((residency, hook, Block[Weights](prefix.rstrip("."), count, spec), store, prefix))
        largest = max(block.nbytes for _, _, block, _, _ in blocks)
        budget = _budget(device, largest, prefetch)
        if budget is None and device.type != "cpu":  # no room for two blocks, without which nothing is gained
            continue
        transport: Transport[Weights] = (
            MapTransport(sum(block.nbytes for _, _, block, _, _ in blocks), keep_pages)
            if budget is None or device.type == "cpu"
            else StreamTransport(device, budget)
        )
        has_room = None if device.type == "cpu" else functools.partial(_has_room, device)
        schedule = Schedule(transport, budget, has_room, [block for _, _, block, _, _ in blocks])
        for residency, hook, block, store, prefix in blocks:
            assert hook.weights_map is not None
            residency.binding = PrefetchBinding(schedule, block, store, prefix, hook.weights_map, device)
        schedules.append(schedule)
    root = model.__dict__.get("_hf_hook")
    for member in root.hooks if isinstance(root, SequentialHook) else (root,):
        if isinstance(member, AlignDevicesHook):
            member._schedules = tuple(schedules)
    return tuple(schedules)


def _residencies(model: nn.Module) -> Iterator[tuple[Residency, AlignDevicesHook]]:
    for module in model.modules():
        for residency in residencies_of(module):
            hook = residency.hook
            if residency.slots and isinstance(hook, AlignDevicesHook) and hook.is_prefetched:
                yield residency, hook


def _store_of(residency: Residency, hook: AlignDevicesHook) -> tuple[OffloadedWeightsLoader, str] | None:
    """Find the store of weights that can be prefetched: plain ones, not tied, and for the CPU in files."""
    view = hook.weights_map
    if not isinstance(view, PrefixedDataset):
        return None
    prefix = view.prefix
    if isinstance(view.dataset, OffloadedWeightsLoader):
        store = view.dataset
    elif isinstance(view.dataset, dict):
        store = OffloadedWeightsLoader(state_dict=view.dataset)
    else:
        return None
    tied = hook.tied_params_map or {}
    for slot in residency.slots:
        name = prefix + slot.name
        if packed.find(slot.placeholder) is not None or name not in store:
            return None
        place = store.file_of(name)
        if hook.device is not None and hook.device.type == "cpu" and place is None:
            return None
        # Modules share one copy of a tied weight; the schedule would make one for each. Its address was held.
        if tied and (place is None or place[0].is_mapped(place[1])) and store.stored(name).data_ptr() in tied:
            return None
    return store, prefix


def _has_room(device: torch.device, count: int) -> bool:
    """Return whether that many bytes are free on a device, or free inside torch's cache."""
    module = accelerator_module()
    if module is None or not hasattr(module, "mem_get_info"):
        return True
    free = int(module.mem_get_info(device)[0])
    if hasattr(module, "memory_reserved"):
        free += int(module.memory_reserved(device)) - int(module.memory_allocated(device))
    return free >= count


def _budget(device: torch.device, largest: int, prefetch: Prefetch) -> int | None:
    if not isinstance(prefetch, bool) and prefetch is not None:
        return convert_file_size_to_int(prefetch)
    if device.type == "cpu":
        return max(2 * largest, _LEAST_WINDOW)
    # The least that helps is room for a block that computes and one in transfer; a third lets one more be in transfer.
    wanted = 3 * largest
    module = accelerator_module()
    if module is not None and hasattr(module, "mem_get_info"):
        wanted = min(wanted, int(0.9 * module.mem_get_info(device)[0]))
    return wanted if wanted >= 2 * largest else None
