"""Puts aligning hooks on all modules of a model that need one, and schedules that prefetch what they bring."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn

from accel_bigmodel.device_map.check import loads_whole
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import SequentialHook, add_hook_to_module
from accel_bigmodel.hooks.residency import PrefetchBinding, Residency, residencies_of
from accel_bigmodel.memory import accelerator_module
from accel_bigmodel.offload.prefetch import MapTransport, StreamTransport, TransferSpec, Weights
from accel_bigmodel.offload.schedule import Block, Schedule, Transport
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import TiedTensors, moved_tensors
from accel_core._records import record
from accel_core.modules import packed
from accel_core.modules.compilation import is_compiled_module
from accel_core.modules.sizes import convert_file_size_to_int

Device = int | str | torch.device | None


def _children(module: nn.Module, module_name: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield (f"{module_name}.{name}" if module_name else name), child


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: int | str | torch.device | None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Make every module with a state, at any depth, run on a device; modules that carry a hook keep theirs.

    Args:
        module: The root.
        execution_device: Where inputs and weights have to be.
        skip_keys: Keyword arguments and output keys that are not moved.
        preload_module_classes: Classes whose instances get their submodules' weights at once.
        tied_params_map: Copies on devices by the address of the original.

    Examples:
        >>> attach_execution_device_hook(model, accelerator.device)
        >>> scores = model(torch.rand(2, 64))  # inputs and weights may come from any device
    """
    if "_hf_hook" not in module.__dict__ and len(module.state_dict()) > 0:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    listed = preload_module_classes is not None and type(module).__name__ in preload_module_classes
    if listed or ((hook := _offloading_hook(module)) is not None and hook.place_submodules):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: torch.device | str | int | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Put an aligning hook on every module, at any depth, that holds tensors itself.

    Args:
        module: The root.
        execution_device: Where inputs and weights have to be for a forward.
        offload: Whether the weights are away between forwards.
        weights_map: Offloaded weights by dotted name from the whole model's root.
        offload_buffers: Whether buffers are away too.
        module_name: The root's own dotted name.
        skip_keys: Keyword arguments and output keys that are not moved.
        preload_module_classes: Classes whose instances load their submodules' weights too, for modules that use a
            submodule's weights without calling it; `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` always do.
        tied_params_map: Copies on devices by the address of the original.

    Examples:
        >>> weights = dict(model.state_dict())
        >>> attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
        >>> model.head.weight.device
        device(type='meta')
    """
    settings = HookSettings(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    settings.attach_below(module, module_name, execution_device, offload=offload)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: torch.device | Mapping[str, Device] | None = None,
    offload: bool | dict[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Put aligning hooks on the blocks that a device map names, and on the root, which gives outputs back.

    Args:
        module: The root.
        execution_device: One device, or a device by block name.
        offload: Whether the weights are away between forwards, for all or by block name.
        weights_map: Offloaded weights by dotted name.
        offload_buffers: Whether buffers are away too.
        module_name: The root's own dotted name.
        skip_keys: Keyword arguments and output keys that are not moved.
        preload_module_classes: Classes whose instances load their submodules' weights too.
        tied_params_map: Copies on devices by the address of the original.

    Examples:
        >>> attach_align_device_hook_on_blocks(model, execution_device={"": "cpu", "blocks": "cpu", "head": "cpu"})
        >>> scores = model(torch.rand(2, 64))
    """
    settings = HookSettings(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, dict):
        if offload:
            settings.attach_below(module, module_name, execution_device)
        else:
            add_hook_to_module(module, settings.hook(execution_device, io_same_device=True, place_submodules=True))
        return
    if isinstance(execution_device, Mapping):
        places: Mapping[str, Device] = execution_device
    else:
        places = dict.fromkeys(offload if isinstance(offload, dict) else (), execution_device)
    away = offload if isinstance(offload, dict) else dict.fromkeys(places, offload)
    settings.attach_on_blocks(module, module_name, places, away)


@record(frozen=True)
class HookSettings:
    """What all hooks of one dispatch share."""

    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: list[str] | None
    tied_params_map: TiedTensors | None
    left_out: Collection[nn.Module] = ()  # what gets its weights another way

    @property
    def hook(self) -> Callable[..., AlignDevicesHook]:
        """What makes a hook of this dispatch, of the other arguments of one."""
        return functools.partial(AlignDevicesHook, skip_keys=self.skip_keys, tied_params_map=self.tied_params_map)

    def _weights_below(self, name: str) -> Mapping[str, torch.Tensor] | None:
        return None if self.weights_map is None else PrefixedDataset(self.weights_map, f"{name}." if name else "")

    def attach_below(self, module: nn.Module, name: str, device: Device, *, offload: bool = True) -> None:
        """Put a hook on every module, at any depth, that holds tensors itself."""
        if module in self.left_out:
            return
        no_split = offload and loads_whole(module, self.preload_module_classes)
        if no_split or any(value is not None for value in (*module._parameters.values(), *module._buffers.values())):
            hook = self.hook(
                device,
                offload=offload,
                weights_map=self._weights_below(name),
                offload_buffers=self.offload_buffers,
                place_submodules=no_split,
            )
            add_hook_to_module(module, hook, append=True)
        if not no_split:
            for child_name, child in _children(module, name):
                self.attach_below(child, child_name, device, offload=offload)

    def attach_on_blocks(
        self, module: nn.Module, name: str, places: Mapping[str, Device], away: Mapping[str, bool]
    ) -> None:
        """Put hooks on a module if the map names it or a tensor of its own, and on the blocks below it."""
        if name in places and name in away:
            self._attach_to_block(module, name, places[name], away[name])
            below = f"{name}." if name else ""
            if not any(entry.startswith(below) for entry in places if entry != name):
                return
        elif entries := _own_entries(module, name, places):
            offloads = any(away.get(entry, False) for entry in entries)
            hook = self.hook(
                places[entries[0]],
                offload=offloads,
                weights_map=self._weights_below(name) if self.weights_map and offloads else None,
                offload_buffers=self.offload_buffers,
                io_same_device=not name,
            )
            add_hook_to_module(module, hook, append=True)
        elif not name:
            add_hook_to_module(module, self.hook(places.get(""), io_same_device=True), append=True)
        for child_name, child in _children(module, name):
            self.attach_on_blocks(child, child_name, places, away)

    def _attach_to_block(self, module: nn.Module, name: str, device: Device, away: bool) -> None:
        """Put hooks on a block that the map names, and on what is below it."""
        is_root = not name
        if away:
            self.attach_below(module, name, device)
            if "_hf_hook" not in module.__dict__:
                add_hook_to_module(module, self.hook(device, io_same_device=is_root))
            elif is_root and (hook := _offloading_hook(module)) is not None:
                hook.io_same_device = True  # one hook: transformers reads `weights_map` of the root's
            elif is_root:
                add_hook_to_module(module, self.hook(io_same_device=True), append=True)
        else:
            hook = self.hook(
                device, offload_buffers=self.offload_buffers, io_same_device=is_root, place_submodules=True
            )
            add_hook_to_module(module, hook)
        attach_execution_device_hook(module, device, self.skip_keys, self.preload_module_classes, self.tied_params_map)


def _own_entries(module: nn.Module, module_name: str, places: Mapping[str, Device]) -> list[str]:
    """List the entries of a device map that name a module's own tensors."""
    prefix = f"{module_name}." if module_name else ""
    return [f"{prefix}{key}" for key in (*module._parameters, *module._buffers) if f"{prefix}{key}" in places]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's own hook keeps its weights away between forwards.

    Args:
        module: The module.

    Returns:
        True when it carries an offloading `AlignDevicesHook`, alone or in a sequence.

    Examples:
        >>> from accel import cpu_offload
        >>> model = cpu_offload(model)
        >>> has_offloaded_params(model.head)
        True
    """
    return _offloading_hook(_hooked(module)) is not None


def _hooked(module: nn.Module) -> nn.Module:
    """Return the module that carries the hooks of one's weights: of a compiled one it is the module inside."""
    found: nn.Module = module._orig_mod if is_compiled_module(module) else module  # type: ignore[assignment]
    return found


def _offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = module.__dict__.get("_hf_hook")
    for candidate in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(candidate, AlignDevicesHook) and candidate.offload:
            return candidate
    return None


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """Have a module's own weights on a device for a while, wherever they are stored.

    Args:
        module: The module.
        execution_device: The device; by default the one that its hook computes on, or where its weights are.

    Raises:
        OffloadError: On entering, when a weight is empty and no hook knows its value.

    Examples:
        >>> with align_module_device(model, "cpu"):
        ...     total = sum(weight.sum() for weight in model.parameters())
    """
    module = _hooked(module)
    hook = _offloading_hook(module)
    if hook is None:
        alone = execution_device is None
        with contextlib.nullcontext() if alone else moved_tensors(module, torch.device(execution_device)):  # type: ignore[arg-type]
            yield
        return
    kept = hook.execution_device
    if execution_device is not None:
        hook.execution_device = execution_device
    try:
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.post_forward(module, None)
    finally:
        hook.execution_device = kept


Prefetch = bool | int | str | None
_LEAST_WINDOW = 64 * 2**20


def attach_prefetch(
    model: nn.Module, prefetch: Prefetch = None, keep_pages: bool | None = None
) -> tuple[Schedule[Weights], ...]:
    """Prefetch the offloaded weights of a dispatched model."""
    if prefetch is False:
        return ()
    groups: dict[torch.device, list[tuple[Residency, Block[Weights]]]] = {}
    for residency in (each for module in model.modules() for each in residencies_of(module)):
        block, device = _block_of(residency), residency.hook.device
        if block is not None and device is not None:
            groups.setdefault(device, []).append((residency, block))
    schedules = []
    for device, members in groups.items():
        blocks = [block for _, block in members]
        budget = _budget(device, max(block.nbytes for block in blocks), prefetch)
        transport: Transport[Weights]
        if device.type == "cpu":
            transport, has_room = MapTransport(sum(block.nbytes for block in blocks), keep_pages), None
        elif budget is not None:
            transport, has_room = StreamTransport(device, budget), functools.partial(_has_room, device)
        else:  # no room for two blocks, without which nothing is gained
            continue
        schedule = Schedule(transport, budget, has_room, blocks)
        for residency, block in members:
            residency.binding = PrefetchBinding(schedule, block, residency.hook.weights_map, device)
        schedules.append(schedule)
    root = model.__dict__.get("_hf_hook")
    for member in root.hooks if isinstance(root, SequentialHook) else (root,):
        if isinstance(member, AlignDevicesHook):
            member._schedules = tuple(schedules)
    return tuple(schedules)


def _block_of(residency: Residency) -> Block[Weights] | None:
    """Return weights that can be prefetched as a block: plain ones, not tied, and for the CPU in files."""
    hook, slots = residency.hook, residency.slots
    view = hook.weights_map
    if not slots or not hook.is_prefetched or not isinstance(view, PrefixedDataset):
        return None
    if isinstance(view.dataset, OffloadedWeightsLoader):
        store = view.dataset
    elif isinstance(view.dataset, dict):
        store = OffloadedWeightsLoader(state_dict=view.dataset)
    else:
        return None
    names = [view.prefix + slot.name for slot in slots]
    for name, slot in zip(names, slots, strict=True):
        if packed.find(slot.placeholder) is not None or name not in store:
            return None
        place = store.file_of(name)
        if hook.device is not None and hook.device.type == "cpu" and place is None:
            return None
        # Modules share one copy of a tied weight; the schedule would make one for each. Its address was held.
        tied = hook.tied_params_map
        if tied and (place is None or place[0].is_mapped(place[1])) and store.stored(name).data_ptr() in tied:
            return None
    count = sum(slot.shape.numel() * slot.dtype.itemsize for slot in slots)
    return Block(view.prefix.rstrip("."), count, TransferSpec(names, [slot.dtype for slot in slots], store))


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
