"""A model spread over devices, the CPU and the disk, ready to run."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.load import LoadOptions, load, loading_index, packed_for
from accel_bigmodel.device_map.balance import chosen_device_map
from accel_bigmodel.device_map.check import AnyDevice, device_of, in_names_of
from accel_bigmodel.device_map.placement import Placement
from accel_bigmodel.experts.door import CachedExperts, device_map_with_cache
from accel_bigmodel.gguf.packed import GGUF
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.attach import HookSettings, Prefetch, attach_prefetch
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.hooks.residency import packed_key
from accel_bigmodel.hooks.whole import CpuOffload, UserCpuOffloadHook
from accel_bigmodel.offload.placeholders import is_placeholder
from accel_bigmodel.offload.prefetch import pin_in_place
from accel_bigmodel.offload.store import OffloadedWeightsLoader, offload_once
from accel_bigmodel.placement import TiedTensors, as_device, in_normal_mode, retie_parameters
from accel_bigmodel.sizes import named_tensors
from accel_core._records import record
from accel_core.checkpoint.remote.weights import local_weights
from accel_core.errors import ConfigurationError, OffloadError, OffloadFolderError
from accel_core.logging import get_logger
from accel_core.modules import packed
from accel_core.modules.compilation import is_compiled_module

logger = get_logger(__name__)


@in_normal_mode
def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch: Prefetch = None,
    pinned: int | str | None = None,
) -> nn.Module:
    """Keep all weights of a model on the CPU; each comes to the device for its module's forward only.

    Args:
        model: The model, changed in place.
        execution_device: Where the forward runs; by default where the model's first parameter is.
        offload_buffers: Whether buffers are on the CPU too.
        state_dict: The weights to keep; by default the model's own.
        preload_module_classes: Classes whose instances load their submodules' weights too.
        prefetch: Whether weights are prefetched, and within how many bytes; by default where it helps.
        pinned: Bytes or a written size: how much of the model's own weights that wait on the CPU for an accelerator is
            put into pinned memory, from which copies are fastest and which the system cannot page out; by default up
            to a quarter of the machine's memory.

    Returns:
        The model.

    Examples:
        >>> model = cpu_offload(model, execution_device=accelerator.device)
        >>> scores = model(torch.rand(2, 64))
        >>> model.head.weight.device  # between forwards
        device(type='meta')
    """
    device = _execution_device(model, execution_device)
    if state_dict is None:
        pin_in_place(model.parameters(), device, pinned)
        kept = {name: value.to("cpu") for name, value in _whole_state(model).items()}
    else:
        kept = _own_names(model, state_dict)
    return _offload(model, device, HookSettings(kept, offload_buffers, None, preload_module_classes, None), prefetch)


@in_normal_mode
def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch: Prefetch = None,
) -> nn.Module:
    """Keep all weights of a model in a folder; each comes to the device for its module's forward only.

    Args:
        model: The model, changed in place.
        offload_dir: The folder. One that already holds this model's weights is used as it is, and one that holds any
            weights gives them to an empty model.
        execution_device: Where the forward runs; by default where the model's first parameter is.
        offload_buffers: Whether buffers are on disk too.
        preload_module_classes: Classes whose instances load their submodules' weights too.
        prefetch: Whether weights are prefetched, and within how many bytes; by default where it helps.

    Returns:
        The model.

    Raises:
        OffloadError: When the folder holds other weights than the model, lacks some, or cannot be written.

    Examples:
        >>> model = disk_offload(model, "on_disk")
        >>> scores = model(torch.rand(2, 64))
    """
    device = _execution_device(model, execution_device)
    state = _whole_state(model)
    buffers = set() if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    offload_once(offload_dir, state, needed := state.keys() - buffers)
    stored = OffloadedWeightsLoader(save_folder=offload_dir)
    stored.map_files(needed)
    return _offload(model, device, HookSettings(stored, offload_buffers, None, preload_module_classes, None), prefetch)


def _offload(model: nn.Module, device: torch.device, settings: HookSettings, prefetch: Prefetch) -> nn.Module:
    """Put hooks on a model whose weights are all offloaded between forwards."""
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    settings.attach_below(model, "", device)
    attach_prefetch(model, prefetch)
    return model


def _execution_device(model: nn.Module, asked: torch.device | None) -> torch.device:
    if asked is not None:
        return as_device(asked)
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def _whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, packed ones as the plain parts they are stored in."""
    # A module's extra state stays with the module: it is not a weight, and not always a tensor.
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        form = packed.find(parameter)
        if form is not None:
            state |= {packed_key(name, suffix): part for suffix, part in form.unpack(parameter).items()}
    return state


@in_normal_mode
def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it runs; it stays on the device until its hook is told to offload it.

    Args:
        model: The model, changed in place.
        execution_device: Where it runs; by default the accelerator, or the CPU when there is none.
        prev_module_hook: The hook of the model that runs before; it is offloaded when this one runs.

    Returns:
        The model and its hook.

    Examples:
        >>> encoder, encoder_hook = cpu_offload_with_hook(torch.nn.Linear(64, 64))
        >>> decoder, decoder_hook = cpu_offload_with_hook(Net(), prev_module_hook=encoder_hook)
        >>> scores = decoder(encoder(torch.rand(2, 64)))  # the encoder leaves when the decoder runs
        >>> decoder_hook.offload()
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


@in_normal_mode
def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, AnyDevice],
    main_device: int | str | torch.device | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    prefetch: Prefetch = None,
    expert_cache: int | str | None = None,
    expert_lookahead: bool = False,
    keep_pages: bool | None = None,
    pinned: int | str | None = None,
) -> nn.Module:
    """Spread a model over devices as a map says, and put hooks on it so that it runs like one.

    Args:
        model: The model, changed in place.
        device_map: Devices by name of submodule or tensor; "cpu" and "disk" are where weights wait for their forward.
        main_device: Where offloaded parts compute; by default the first device of the map that is neither "cpu" nor
            "disk". With a main device of "cpu" or "mps" only "disk" parts are offloaded.
        state_dict: Weights of the parts on "cpu"; by default the model's own.
        offload_dir: Where the weights of the parts on "disk" are, or are written.
        offload_index: Entries of the weights on disk by name; by default what loading left on disk, or the folder's.
        offload_buffers: Whether buffers of offloaded parts are away too.
        skip_keys: Keyword arguments and output keys that are not moved between devices.
        preload_module_classes: Classes whose instances load their submodules' weights too.
        force_hooks: Whether a model on one device gets hooks as well.
        prefetch: Whether offloaded weights are prefetched, and within how many bytes; by default where it helps.
        expert_cache: Bytes or a written size ("8GiB"): experts of a mixture that wait on "cpu" or "disk" come one by
            one when tokens choose them, and this much of them stays on the device; `model.expert_report()` tells how
            well that works. By default all experts of a layer come for its forward.
        expert_lookahead: Whether each block of experts also runs the next one's router, on its own input in evaluation,
            and has the experts fetched that it names. A wrong guess costs bandwidth, and never changes an output.
        keep_pages: Whether the pages of files on "disk" that the CPU computes with stay mapped after a block's forward;
            by default as long as the memory that is available has room for all of them. They belong to the system's
            page cache, which takes them back when memory is short.
        pinned: As for `cpu_offload`.

    Returns:
        The model. Its `hf_device_map` is the map.

    Raises:
        DeviceMapError: When the map misses a tensor, or an offloaded block is larger than the device it comes to.
        DeviceUnavailableError: When the map names a device that is not here.
        ConfigurationError: When tensors of parts that stay on a device are empty, `expert_cache` does not fit, or pages
            are to go that nothing releases (`keep_pages=False` with `prefetch=False`).
        OffloadError: When weights have to be written and no `offload_dir` is given, or it holds another model's.

    Examples:
        >>> model = dispatch_model(Net(), {"": "cpu"})
    """
    _check_pages(prefetch, keep_pages)
    placement = Placement.of(model, device_map, main_device)
    cached = CachedExperts.of(placement, expert_cache, expert_lookahead)
    placement.check_blocks_fit(preload_module_classes, alone=cached.modules)
    if offload_index is not None:
        offload_index = in_names_of(model, offload_index)
    kept = None if state_dict is None else _own_names(model, state_dict)
    _check_values(placement, kept or {})
    weights = _Weights(kept, offload_dir, offload_index, offload_buffers, pinned)
    return _dispatch(placement, weights, skip_keys, preload_module_classes, force_hooks, (prefetch, keep_pages), cached)


def _check_pages(prefetch: Prefetch, keep_pages: bool | None) -> None:
    """Refuse to release pages where nothing does."""
    if prefetch is False and keep_pages is False:
        raise ConfigurationError(
            "Prefetching is what releases the pages of a block that ran; got keep_pages=False and prefetch=False. "
            "Leave one of them out."
        )


def _own_names(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict under the model's own names; itself where it has them: hooks show it as it was given."""
    found = in_names_of(model, state_dict)
    return found if isinstance(found, dict) else dict(found)


def _check_values(placement: Placement, given: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors in memory are not empty; weights on disk are looked up when they are needed."""
    left = [
        name
        for name, tensor in (*placement.model.named_parameters(), *placement.model.named_buffers())
        if tensor.is_meta
        and name not in given
        and not is_placeholder(tensor)
        and str(placement.device_of(name)) not in ("disk", "meta")
    ]
    if left:
        raise ConfigurationError(
            f"A model without weights cannot be dispatched; got no value for {', '.join(left)}. Load them first, or "
            "use `load_checkpoint_and_dispatch`."
        )


@record(frozen=True)
class _Weights:
    """Where offloaded weights are between forwards."""

    state_dict: dict[str, torch.Tensor] | None  # those on the CPU; None for the model's
    folder: str | os.PathLike[str] | None
    index: Mapping[str, Any] | None  # None for what loading left on the disk, or else the folder's
    buffers: bool
    pinned: int | str | None

    def open(self, placement: Placement) -> OffloadedWeightsLoader | None:
        """Find or write the weights; None if nothing is offloaded."""
        on_disk, on_cpu = placement.waits_on("disk"), placement.waits_on("cpu")
        if not on_cpu and not on_disk:
            return None
        model, kept, index = placement.model, self.state_dict, self.index
        own = None
        if on_cpu and kept is None:
            waiting = (each for name, each in model.named_parameters() if str(placement.device_of(name)) == "cpu")
            pin_in_place(waiting, as_device(placement.main), self.pinned)
            own = _whole_state(model)
            kept = {name: value.to("cpu") for name, value in placement.going_to("cpu", own).items()}
        if index is None:
            index = loading_index(model) or None
        if on_disk and index is None:
            self._write(placement, on_disk, _whole_state(model) if own is None else own)
        kept = kept or {}
        if not on_disk:
            weights = OffloadedWeightsLoader(state_dict=kept, index={})
        else:
            weights = OffloadedWeightsLoader(state_dict=kept, save_folder=self.folder, index=index)
        extra = _extra_in_memory(placement, weights)
        if extra:
            kept = {**weights.state_dict, **extra}
            weights = OffloadedWeightsLoader(kept, save_folder=self.folder, index=weights.index)
        weights.map_files(name for name in weights.index if str(placement.device_of(name)) == "disk")
        return weights

    def _write(self, placement: Placement, on_disk: list[str], own: dict[str, torch.Tensor]) -> None:
        if self.folder is None:
            raise OffloadFolderError(
                "We need an `offload_dir` to dispatch this model according to this `device_map`, the following "
                f"submodules need to be offloaded; got {', '.join(on_disk)}, no folder and no index of weights on "
                "disk. Pass `offload_dir`."
            )
        buffers = dict(placement.model.named_buffers(remove_duplicate=False)) if not self.buffers else {}
        there = placement.going_to("disk", own)
        offload_once(self.folder, there, there.keys() - buffers.keys())


def _dispatch(
    placement: Placement,
    weights: _Weights,
    skip_keys: str | list[str] | None,
    preload_module_classes: list[str] | None,
    force_hooks: bool,
    reading: tuple[Prefetch, bool | None],
    experts: CachedExperts,
) -> nn.Module:
    """Move a model to its one device, or put hooks on it."""
    model, devices = placement.model, set(placement.devices.values())
    is_quantized = getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False)
    if len(devices) > 1 or is_quantized or force_hooks or devices == {"disk"}:
        stored = weights.open(placement)
        copies = _tied_copies(placement, stored)
        experts.attach(placement, stored, skip_keys)
        settings = HookSettings(
            stored, weights.buffers, skip_keys, preload_module_classes, copies, frozenset(experts.modules.values())
        )
        settings.attach_on_blocks(model, "", placement.compute, placement.away)
        if any(placement.away.values()):
            empty = [place for place in ("cpu", "disk") if placement.waits_on(place)]
            logger.info("Weights wait on the %s, as meta tensors, until their block runs.", " and ".join(empty))
        retie_parameters(model, placement.tied)  # hooks gave each name a tensor of its own
        for method in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"):
            if hasattr(model, method):
                object.__setattr__(model, method, _Refusal(model, method))
        attach_prefetch(model, *reading)
    else:
        model.to(as_device(next(iter(devices))))
    # A compiled module passes plain assignments on to the module inside, and both have to show the map.
    for one in (model, model._orig_mod) if is_compiled_module(model) else (model,):
        for name, value in {"hf_device_map": dict(placement.given), **experts.shown}.items():
            object.__setattr__(one, name, value)
    return model


def _extra_in_memory(placement: Placement, weights: OffloadedWeightsLoader) -> dict[str, torch.Tensor]:
    """Return the weights in memory that hooks ask for beside the offloaded ones."""
    model, away = placement.model, placement.away
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    mixed = {name.rpartition(".")[0] for name in away if away[name] and name not in modules}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        # Tied to a tensor that stays, or in one module with a tensor that has an entry of its own in the map.
        asked = name.rpartition(".")[0] in mixed or device_of(name, away)
        if asked and name not in weights and not tensor.is_meta and packed.find(tensor) in (None, GGUF):
            found[name] = GGUF.unpack(tensor)[""] if packed.find(tensor) is GGUF else tensor.detach()
    return found


def _tied_copies(placement: Placement, weights: OffloadedWeightsLoader | None) -> TiedTensors:
    """Return, by the address of every offloaded tied weight, where its copies on devices will be noted."""
    copies: TiedTensors = {}
    for name in (name for group in placement.tied for name in group):
        if weights is not None and name in weights.all_keys and device_of(name, placement.away):
            value = weights[name]
            # Tensors without elements all have the address 0, and would look like one tensor.
            if value.numel():
                place = weights.file_of(name)
                if place is not None:
                    place[0].hold(place[1])
                copies[value.data_ptr()] = {}
    return copies


class _Refusal:
    """Replaces `.to` and similar methods of a dispatched model: moving it would undo the map."""

    def __init__(self, model: nn.Module, method: str) -> None:
        functools.update_wrapper(self, getattr(type(model), method))
        self.model = model
        self.method = method

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Warn, and move the model only if all its weights are in memory."""
        move = getattr(type(self.model), self.method)
        if "_hf_hook" not in self.model.__dict__:  # its hooks were removed, so it is a plain model again
            return move(self.model, *args, **kwargs)
        logger.warning("You shouldn't move a model that a device map placed: parts of it would leave their devices.")
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise OffloadError(
                "You can't move a model that has some modules offloaded to cpu or disk; got weights that are not in "
                "memory. Dispatch it with another device map instead."
            )
        return move(self.model, *args, **kwargs)


@in_normal_mode
def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, AnyDevice] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    prefetch: Prefetch = None,
    expert_cache: int | str | None = None,
    expert_lookahead: bool = False,
    keep_pages: bool | None = None,
    pinned: int | str | None = None,
    dequantize: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model and spread it over devices, the CPU and the disk.

    Weights on "disk" that are in safetensors or GGUF files are used in place: nothing is written.

    Args:
        model: The model, usually empty; changed in place.
        checkpoint: A weights file (safetensors, GGUF, or of `torch.save`), an index (`.json`), or a folder with one; or
            the address of one in a store, which is fetched first.
        device_map: Devices by name, or "auto", "balanced", "balanced_low_0" or "sequential" to have them chosen. None
            loads without dispatching.
        max_memory: Bytes or written sizes by device, for the choice; by default what is free.
        no_split_module_classes: Class names of modules that stay on one device.
        offload_folder: Where weights on "disk" are written that no safetensors file holds.
        offload_buffers: Whether buffers of offloaded parts are away too.
        dtype: The dtype that floating point weights are cast to; by default the model's own.
        offload_state_dict: Accepted: what goes to the CPU is mapped from its file and needs no room twice.
        skip_keys: Keyword arguments and output keys that are not moved between devices.
        preload_module_classes: Classes whose instances load their submodules' weights too.
        force_hooks: Whether a model on one device gets hooks as well.
        strict: Whether missing and unexpected names are an error.
        full_state_dict: With `broadcast_from_rank0`: whether the checkpoint holds whole tensors.
        broadcast_from_rank0: Whether the first process reads and sends the tensors to all others.
        prefetch: Whether offloaded weights are prefetched, and within how many bytes; by default where it helps.
        expert_cache: As for `dispatch_model`. With a chosen map, dense parts are placed so that the cache has room, and
            all experts wait on the disk.
        expert_lookahead: As for `dispatch_model`.
        keep_pages: As for `dispatch_model`.
        pinned: As for `cpu_offload`.
        dequantize: Whether packed weights of a GGUF file are unpacked while they are loaded, as for
            `load_checkpoint_in_model`; by default they stay packed, also where they wait.

    Returns:
        The model.

    Raises:
        ConfigurationError: When `expert_cache` does not fit the model or its device, or pages are to go that nothing
            releases (`keep_pages=False` with `prefetch=False`).
        CheckpointError: When the checkpoint is missing, damaged, unsafe, or does not fit; the model is as it was.
        DeviceMapError: When the map is unknown, misses a tensor, or memory does not suffice.
        DeviceUnavailableError: When the map names a device that is not here.
        OffloadError: When weights must be written and `offload_folder` is missing or cannot be.

    Examples:
        >>> model = load_checkpoint_and_dispatch(Net(), "checkpoint", device_map="auto")

        >>> accelerator.save_model(model, "memory://bucket/weights")
        >>> model = load_checkpoint_and_dispatch(Net(), "memory://bucket/weights", device_map={"": "disk"})
    """
    _check_pages(prefetch, keep_pages)
    options = LoadOptions(offload_folder, dtype, (), offload_buffers, False, strict, device_map is not None, dequantize)
    from_rank0 = broadcast_from_rank0 and full_state_dict
    checkpoint = local_weights(checkpoint)
    with packed_for(model, checkpoint, options, from_rank0=from_rank0):
        # Limits bound what is prefetched only where they decided the map, and nobody chose a window.
        limits = max_memory if isinstance(device_map, str) and prefetch is None else None
        if isinstance(device_map, str):
            choice = (device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
            if expert_cache is None:
                device_map = chosen_device_map(model, *choice)
            else:
                device_map = device_map_with_cache(model, expert_cache, *choice)
        placement = Placement.standing(model) if device_map is None else Placement.of(model, device_map)
        if limits is not None:
            prefetch = placement.room_left(limits, dtype)
        cached = CachedExperts.of(placement, expert_cache, expert_lookahead, dtype)
        placement.check_blocks_fit(preload_module_classes, dtype, cached.modules)
        load(placement, checkpoint, options, from_rank0=from_rank0)
    if device_map is None:
        return model
    weights = _Weights(None, offload_folder, None, offload_buffers, pinned)
    return _dispatch(placement, weights, skip_keys, preload_module_classes, force_hooks, (prefetch, keep_pages), cached)
