"""Whether the offloaded weights of one (hook, module) pair are in memory, and how they come and go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_bigmodel.offload.placeholders import forbid_gradient, forget, is_placeholder, placeholder_for
from accel_bigmodel.offload.prefetch import Weights
from accel_bigmodel.offload.schedule import Block, Schedule
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import as_device
from accel_core.errors import OffloadError
from accel_core.modules import packed
from accel_core.modules.traversal import get_non_persistent_buffers, owner_of

__all__ = ["Residency", "Slot", "residency_of"]

_KEY = "_accel_residencies"


def residency_of(module: nn.Module, hook: Any) -> "Residency | None":
    """Find the residency of a hook's weights in a module.

    Args:
        module: The module.
        hook: The hook.

    Returns:
        It, or None when the hook offloads nothing there.
    """
    for residency in module.__dict__.get(_KEY, ()):
        if residency.hook is hook:
            found: Residency = residency
            return found
    return None


def packed_key(name: str, suffix: str) -> str:
    """Name a stored part of a packed parameter: `""` is the weights themselves, other parts lie beside them.

    Args:
        name: The parameter's name.
        suffix: The part.

    Returns:
        The part's name in a state dict.
    """
    if not suffix:
        return name
    path, _, _ = name.rpartition(".")
    return f"{path}.{suffix}" if path else suffix


class Slot:
    """One offloaded tensor: where it sits in its module, its placeholder, and the original if it still exists."""

    __slots__ = (
        "cached",
        "cls",
        "device",
        "key",
        "name",
        "original",
        "placeholder",
        "requires_grad",
        "shape",
        "source",
        "store"
    )  # fmt: skip

    def __init__(self, name: str, store: dict[str, Any], key: str, block: str) -> None:
        tensor = store[key]
        self.name = name
        self.store = store
        self.key = key
        self.cls = nn.Parameter if is_placeholder(tensor) else type(tensor)
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.shape = tensor.shape
        self.original: torch.Tensor | None = None if is_placeholder(tensor) else tensor
        form = packed.find(tensor)
        self.placeholder = (
            placeholder_for(tensor, name, block) if form is None else form.move(tensor, torch.device("meta"))
        )
        self.source: torch.Tensor | None = None
        self.cached: torch.Tensor | None = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out what a copy finds again by itself."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, {**state, "source": None, "cached": None}

    def loaded(self, weights: Mapping[str, torch.Tensor], value: torch.Tensor, device: torch.device | None) -> Any:
        """Give the tensor to compute with.

        Args:
            weights: All weights of the module, for the parts of packed ones.
            value: The weight.
            device: Where it has to be; None leaves it where it is.

        Returns:
            The tensor that takes the placeholder's place.
        """
        if value is self.source and self.cached is not None and device in (None, self.cached.device):
            return self.cached
        placeholder = self.placeholder
        form = packed.find(placeholder)
        if form is not None:
            stored = {suffix: weights[packed_key(self.name, suffix)] for suffix in form.parts(placeholder)}
            return form.rebuild(placeholder, {**stored, "": value}, device or value.device)
        return self.adopted(value.detach().to(device=device, dtype=placeholder.dtype), value)

    def parts(self) -> Sequence[str]:
        """Name the stored parts of the tensor: `""` for a plain one."""
        form = packed.find(self.placeholder)
        return ("",) if form is None else form.parts(self.placeholder)

    def adopted(self, data: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Give the tensor to compute with, of data that is where it has to be.

        Args:
            data: The data.
            value: The weight it was made of; when it shares its memory with it, the result is used again.

        Returns:
            The tensor that takes the placeholder's place.

        Raises:
            OffloadError: When it has another shape than its place.
        """
        if value is self.source and self.cached is not None and data is value:
            return self.cached
        if value.shape != self.shape:
            raise OffloadError(
                f"An offloaded weight has another shape than its place. Found {tuple(value.shape)} for {self.name!r}, "
                f"which is {tuple(self.shape)}. Put a weight of that shape into the weights map."
            )
        made = self._wrapped(data.detach())
        if data.device == value.device and data.data_ptr() == value.data_ptr():
            self.source, self.cached = value, made
        return made

    def detach_from(self, value: torch.Tensor) -> None:
        """Replace the loaded tensor by a copy if it shares its memory with a weight in a file's map.

        Args:
            value: The weight in the map.
        """
        loaded = self.store[self.key]
        if loaded.device == value.device and loaded.numel() and loaded.data_ptr() == value.data_ptr():
            self.store[self.key] = self._wrapped(loaded.detach().clone())

    def _wrapped(self, data: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.placeholder, nn.Parameter):
            return data
        requires_grad = self.requires_grad and (data.is_floating_point() or data.is_complex())
        if self.cls is nn.Parameter:
            made: torch.Tensor = nn.Parameter(data, requires_grad=requires_grad)
        else:
            made = torch.Tensor._make_subclass(self.cls, data, requires_grad)
        if requires_grad:
            forbid_gradient(made, self.name)
        return made


@dataclass
class PrefetchBinding:
    """How the weights of a residency come ahead of time.

    Attributes:
        schedule: What moves them.
        block: They, to the schedule.
        store: Where they are.
        prefix: What is put before a slot's name in the store.
        weights_map: The hook's map when this was set up; with another one the schedule is left.
        device: Where they are brought.
        acquired: Whether the block is in use.
    """

    schedule: Schedule[Weights]
    block: Block[Weights]
    store: OffloadedWeightsLoader
    prefix: str
    weights_map: Mapping[str, torch.Tensor]
    device: torch.device
    acquired: bool = False


class Residency:
    """The offloaded tensors of one module under one hook.

    Args:
        module: The module.
        hook: The hook.
    """

    def __init__(self, module: nn.Module, hook: Any) -> None:
        self.module = module
        self.hook = hook
        self.resident = False
        self.own_map: Mapping[str, torch.Tensor] | None = None
        self.binding: PrefetchBinding | None = None
        block = getattr(hook.weights_map, "prefix", "").rstrip(".") or type(module).__name__
        self.slots = [
            Slot(name, store, key, block)
            for name, store, key in _places(module, hook.offload_buffers, hook.place_submodules)
        ]
        prefix = getattr(hook.weights_map, "prefix", "")
        for slot in self.slots:
            if is_placeholder(slot.placeholder):
                slot.placeholder.__dict__["weight_name"] = prefix + slot.name
        module.__dict__.setdefault(_KEY, []).append(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the schedule out of copies and pickles: a copy loads its weights when it needs them."""
        return {**self.__dict__, "binding": None}

    def send_away(self, hook: Any) -> None:
        """Empty the module: its tensors are in the hook's weights map from now on."""
        if hook.weights_map is None or hook.weights_map is hook._own_map:
            self.own_map = hook.weights_map = hook._own_map = self._kept()
        for slot in self.slots:
            original = slot.original
            if original is not None and not original.is_meta and not self._shares(hook, slot, original):
                slot.original = None
            slot.store[slot.key] = slot.placeholder
        self.resident = False

    def _kept(self) -> dict[str, torch.Tensor]:
        """Keep the module's own tensors on the CPU, for a hook that was given no weights."""
        kept: dict[str, torch.Tensor] = {}
        for slot in self.slots:
            tensor = slot.store[slot.key]
            form = packed.find(tensor)
            if form is None:
                kept[slot.name] = tensor.to("cpu")
            else:
                for suffix, part in form.unpack(tensor).items():
                    kept[packed_key(slot.name, suffix)] = part.to("cpu")
        return kept

    def _shares(self, hook: Any, slot: Slot, original: torch.Tensor) -> bool:
        """Tell whether keeping the original costs nothing: it shares its memory with the map's weight."""
        try:
            value = self.weights(hook)[slot.name]
        except KeyError:
            raise OffloadError(
                f"A weight has no value in the weights map. Looked for {slot.name!r} of "
                f"{type(self.module).__name__}. Pass a map that holds every tensor of the module."
            ) from None
        return (
            packed.find(original) is None
            and value.device == original.device
            and (value.data_ptr() == original.data_ptr())
        )

    def weights(self, hook: Any) -> Mapping[str, torch.Tensor]:
        """Give the weights map as it is now: the hook's, or the module's own when the hook was given none.

        Args:
            hook: The hook.

        Returns:
            The weights by name in the module.
        """
        given: Mapping[str, torch.Tensor] = hook.weights_map
        own = self.own_map
        return given if own is None or given is not hook._own_map else own

    def load(self, hook: Any, writable: bool = False) -> None:
        """Put the weights in place; nothing happens when they are.

        Args:
            hook: The hook.
            writable: Whether somebody may write to them: weights that are views of a file's map are then copied.

        Raises:
            OffloadError: When a weight is not in the map.
        """
        weights = self.weights(hook)
        device = hook.device
        if self.binding is not None and not writable and self._prefetched(self.binding, weights, device):
            return
        in_files = _file_names(weights)
        tied = hook.tied_params_map
        slot = None
        try:
            for slot in self.slots:
                value = weights[slot.name]
                if tied:
                    slot.store[slot.key] = self._tied(slot, weights, value, device, tied)
                else:
                    slot.store[slot.key] = slot.loaded(weights, value, device)
                if in_files is not None and (writable or not isinstance(slot.placeholder, nn.Parameter)):
                    slot.detach_from(value)
        except KeyError as failure:
            self.release(hook)
            name = slot.name if slot is not None else "?"
            raise OffloadError(
                f"An offloaded weight is not in its weights map. Looked for {name!r} of {type(self.module).__name__}, "
                f"found no {failure}. Pass a map that holds every tensor of the module."
            ) from failure
        except BaseException:
            self.release(hook)
            raise
        self.resident = True

    def _prefetched(
        self, binding: "PrefetchBinding", weights: Mapping[str, torch.Tensor], device: torch.device | None
    ) -> bool:
        """Take the weights that the schedule brings; tell whether it could."""
        if weights is not binding.weights_map or device != binding.device:
            # Somebody put other weights or another device there: from now on they are loaded when they are needed.
            self._leave(binding)
            return False
        if self.resident:
            return True
        content = binding.schedule.acquire(binding.block)
        binding.acquired = True
        store = binding.store
        for slot, tensor, source in zip(self.slots, content.tensors, content.sources, strict=True):
            if store.stored(binding.prefix + slot.name) is source:
                slot.store[slot.key] = slot.adopted(tensor, source)
                if not isinstance(slot.placeholder, nn.Parameter):
                    slot.detach_from(source)
            else:
                slot.store[slot.key] = slot.loaded(weights, weights[slot.name], device)
        self.resident = True
        return True

    def _leave(self, binding: "PrefetchBinding") -> None:
        if binding.acquired:
            binding.acquired = False
            binding.schedule.release(binding.block)
        binding.schedule.forget(binding.block)
        self.binding = None

    def _tied(
        self, slot: Slot, weights: Mapping[str, torch.Tensor], value: torch.Tensor, device: Any, tied: Any
    ) -> torch.Tensor:
        """Load a weight that other modules may have loaded already."""
        copies = tied.get(value.data_ptr()) if not value.is_meta else None
        if copies is None:
            loaded: torch.Tensor = slot.loaded(weights, value, device)
            return loaded
        key = as_device(device) if device is not None else value.device
        made = copies.get(key)
        if made is None:
            made = copies[key] = slot.loaded(weights, value, device)
        return made  # type: ignore[no-any-return]

    def release(self, hook: Any) -> None:
        """Take the weights out again; nothing happens when they are away."""
        tied = hook.tied_params_map
        for slot in self.slots:
            if tied:
                loaded = slot.store[slot.key]
                for copies in tied.values():
                    for device in [key for key, copy in copies.items() if copy is loaded]:
                        del copies[device]
            slot.store[slot.key] = slot.placeholder
        self.resident = False
        binding = self.binding
        if binding is not None and binding.acquired:
            binding.acquired = False
            binding.schedule.release(binding.block)

    def restore(self, hook: Any) -> None:
        """Give the module its tensors back where they were; tensors that were empty before are empty again."""
        if self.binding is not None:
            self._leave(self.binding)
        weights = self.weights(hook)
        for slot in self.slots:
            original = slot.original
            if original is None and slot.device.type != "meta":
                original = self._rebuilt(slot, weights)
            if original is not None:
                slot.store[slot.key] = original
                forget(original)
        residencies = self.module.__dict__[_KEY]
        residencies.remove(self)
        if not residencies:
            del self.module.__dict__[_KEY]

    def _rebuilt(self, slot: Slot, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make the tensor again on its device, once for all modules that share it."""
        shared: torch.Tensor | None = slot.placeholder.__dict__.get("_restored")
        if shared is not None:
            return shared
        form = packed.find(slot.placeholder)
        if form is not None:
            made: torch.Tensor = slot.loaded(weights, weights[slot.name], slot.device)
        else:
            data = weights[slot.name].detach().to(device=slot.device, dtype=slot.placeholder.dtype, copy=True)
            made = data
            if isinstance(slot.placeholder, nn.Parameter):
                made = torch.Tensor._make_subclass(slot.cls, data, slot.requires_grad)
        slot.placeholder.__dict__["_restored"] = made
        return made


def _file_names(weights: Mapping[str, torch.Tensor]) -> OffloadedWeightsLoader | None:
    """Give the store behind a map if some of its weights are in files."""
    store = weights.dataset if isinstance(weights, PrefixedDataset) else weights
    return store if isinstance(store, OffloadedWeightsLoader) and store.index else None


def _places(module: nn.Module, include_buffers: bool, recurse: bool) -> list[tuple[str, dict[str, Any], str]]:
    """List where the offloaded tensors sit: name, holding dict, key; non-persistent buffers are in no map and stay."""
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=recurse)
    names = [name for name, _ in module.named_parameters(recurse=recurse, remove_duplicate=False)]
    places: list[tuple[str, dict[str, Any], str]] = []
    for name in names:
        owner, key = owner_of(module, name)
        places.append((name, owner._parameters, key))
    if include_buffers:
        for name, _ in module.named_buffers(recurse=recurse, remove_duplicate=False):
            if name not in left_out:
                owner, key = owner_of(module, name)
                places.append((name, owner._buffers, key))
    return places
