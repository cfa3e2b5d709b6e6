"""Whether the offloaded weights of one (hook, module) pair are in memory, and how they come and go.

| state | while | moves |
|---|---|---|
| away | no forward runs and nobody holds the weights | `enter`, `hold`: in memory; `restore`: no longer offloaded |
| in memory | `resident` | the last `leave`, or `release` after it: away |

Where each weight is then stands in `accel_bigmodel.hooks.slot`. With a binding, a schedule sends for the weights of the
next blocks; without one they are loaded when they are needed.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from threading import get_ident
from typing import Protocol, cast

import torch
from torch import nn

from accel_bigmodel.hooks.slot import Slot, Store, drop_tied, keep_written, load_tied, packed_key, share_memory
from accel_bigmodel.offload.placeholders import OffloadedTensor, forget, is_placeholder
from accel_bigmodel.offload.prefetch import TransferSpec, Weights
from accel_bigmodel.offload.schedule import Block, Schedule
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accel_bigmodel.placement import TiedTensors, normal_tensors
from accel_core._records import record
from accel_core.errors import OffloadError
from accel_core.modules import packed

__all__ = [
    "OffloadingHook", "OwnWeights", "PrefetchBinding", "Residency", "forget_loaded", "packed_key", "residencies_of",
    "residency_of",
]  # fmt: skip

_KEY = "_accel_residencies"


class OwnWeights(dict[str, torch.Tensor]):
    """The weights that a module had, kept for a hook without a weights map."""


class OffloadingHook(Protocol):
    """What a residency needs from the hook that it belongs to."""

    weights_map: Mapping[str, torch.Tensor] | None
    tied_params_map: TiedTensors | None
    offload_buffers: bool
    place_submodules: bool
    is_prefetched: bool

    @property
    def device(self) -> torch.device | None:
        """The device of the computation; None leaves the weights where they are."""


def residency_of(module: nn.Module, hook: object) -> "Residency | None":
    """Return the residency of a hook's weights in a module."""
    for residency in module.__dict__.get(_KEY, ()):
        if residency.hook is hook:
            found: Residency = residency
            return found
    return None


def residencies_of(module: nn.Module) -> Sequence["Residency"]:
    """Return what a module's hooks offload of it, one residency for each."""
    found: Sequence[Residency] = module.__dict__.get(_KEY, ())
    return found


def forget_loaded(model: nn.Module) -> None:
    """Have each weight of a model wrapped anew at its next load, so that `torch.jit.trace` sees where it comes from."""
    for module in model.modules():
        for residency in residencies_of(module):
            for slot in residency.slots:
                slot.source = None


@record
class PrefetchBinding:
    """How the weights of a residency are prefetched."""

    schedule: Schedule[Weights]
    block: Block[Weights]
    weights_map: Mapping[str, torch.Tensor]  # the hook's when this was set up; with another one the schedule is left
    device: torch.device
    acquired: bool = False


class Residency:
    """The offloaded tensors of one module under one hook.

    The weights are in memory while some forward of the module runs, or while somebody holds them. Forwards are counted,
    not serialized: a forward that is entered while another one runs (recursion, another thread) finds the weights
    there, and the last one to leave sends them away.
    """

    def __init__(self, module: nn.Module, hook: OffloadingHook) -> None:
        self.module = module
        self.hook = hook
        self.resident = False
        self.held = False
        self.own_map: OwnWeights | None = None
        self.binding: PrefetchBinding | None = None
        self._begin()
        prefix = hook.weights_map.prefix if isinstance(hook.weights_map, PrefixedDataset) else ""
        block = prefix.rstrip(".") or type(module).__name__
        self.slots = [
            Slot(name, store, key, block)
            for name, store, key in _places(module, hook.offload_buffers, hook.place_submodules)
        ]
        for slot in self.slots:
            if is_placeholder(slot.placeholder):
                notes = slot.placeholder.__dict__
                notes["weight_name"] = prefix + slot.name
                notes["names"] = [*notes.get("names", ()), prefix + slot.name]
        module.__dict__.setdefault(_KEY, []).append(self)

    def _begin(self) -> None:
        # Held while weights come or go, never while a module computes: a forward that waits for threads of its own
        # cannot wait for itself.
        self.lock = threading.RLock()
        # A list, not a set: a forward that calls itself is in it more than once.
        self._threads: list[int] = []
        self._stream: torch.Stream | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the schedule and what belongs to threads out of copies and pickles."""
        state = {**self.__dict__, "binding": None}
        for name in ("lock", "_threads", "_stream"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Start without running forwards; a copy loads its weights when it needs them."""
        self.__dict__.update(state)
        self._begin()

    def offload(self) -> OwnWeights | None:
        """Empty the module: its tensors are in the hook's weights map from now on.

        Raises:
            OffloadError: When the map lacks a weight; the module is as it was.
        """
        given = self.hook.weights_map
        kept = None
        if given is None or isinstance(given, OwnWeights):
            kept = self._kept() if self.own_map is None else self.own_map
        weights: Mapping[str, torch.Tensor] = kept if kept is not None else self.weights()
        # All are looked up before the first one is emptied: a map that lacks a weight leaves the module as it was.
        shared = [self._shares(slot, weights) for slot in self.slots]
        if kept is not None:
            self.own_map = kept
        for slot, shares in zip(self.slots, shared, strict=True):
            # Keeping the original costs nothing while it shares its memory with the map's weight.
            if slot.original is not None and not slot.original.is_meta and not shares:
                slot.original = None
            slot.store[slot.key] = slot.placeholder
            slot.placed = None
        self.resident = False
        return kept

    def _kept(self) -> OwnWeights:
        """Keep the module's own tensors on the CPU."""
        kept = OwnWeights()
        for slot in self.slots:
            tensor = slot.store[slot.key]
            assert tensor is not None
            form = packed.find(tensor)
            if form is None:
                kept[slot.name] = tensor.to("cpu")
            else:
                for suffix, part in form.unpack(tensor).items():
                    kept[packed_key(slot.name, suffix)] = part.to("cpu")
        return kept

    def _shares(self, slot: Slot, weights: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the original shares its memory with the map's weight."""
        if slot.original is None or slot.original.is_meta:
            return False
        try:
            value = weights[slot.name]
        except KeyError:
            raise OffloadError(
                f"A weight has no value in the weights map; got {slot.name!r} of "
                f"{type(self.module).__name__}. Pass a map that holds every tensor of the module."
            ) from None
        return packed.find(slot.original) is None and share_memory(value, slot.original)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights map as it is now: the hook's, or the module's own when the hook was given none."""
        given = self.hook.weights_map
        if self.own_map is not None and isinstance(given, OwnWeights):
            return self.own_map  # one hook may serve several modules, and shows the weights of the last
        assert given is not None
        return given

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the offloaded weights as they are stored, parts of packed ones each, by name in the module."""
        weights = self.weights()
        for slot in self.slots:
            if slot.is_ours or self._tie(slot):
                for suffix in slot.parts():
                    key = packed_key(slot.name, suffix)
                    yield key, slot.stored_in(weights) if not suffix else weights[key]

    def enter(self, *, writable: bool = False) -> None:
        """Begin a forward: the weights are in place until the last forward has left.

        Raises:
            OffloadError: When a weight cannot be loaded; no forward has begun then.
        """
        with self.lock:
            self._threads.append(get_ident())
            try:
                if self.resident:
                    self._share_stream()
                # A forward that writes needs copies of its own, and a schedule has to learn which block runs.
                elif writable or self.binding is not None or not self._place_again():
                    self._load(writable)
            except BaseException:
                self._threads.pop()
                raise

    def leave(self) -> None:
        """End a forward that was begun on this thread."""
        with self.lock:
            self._threads.remove(get_ident())
            if not self._threads and not self.held:
                self._unload()

    def hold(self) -> None:
        """Put the weights in place until `release`, to be read and written; inside a forward they already are."""
        with self.lock:
            if get_ident() in self._threads:
                return
            if self.held and not self._threads:
                self._unload(compare=True)  # what was written since is kept, and the map is read again
            self._load(writable=True)
            self.held = True

    def release(self) -> None:
        """Take the weights out again, unless a forward runs; what was written to them stays."""
        with self.lock:
            if get_ident() in self._threads:
                return
            held, self.held = self.held, False
            if not self._threads:
                self._unload(compare=held)

    def _load(self, writable: bool) -> None:
        device = self.hook.device
        # What is made here outlives the forward (parameters over a file's map are used again), and an inference tensor
        # could never take part in a backward pass.
        try:
            with normal_tensors():
                self._place(device, writable)
        except BaseException:
            self._unload()
            raise
        self.resident = True
        # A CPU has no streams, and MPS one; elsewhere a thread may compute on another stream than the weights came by.
        if device is not None and device.type not in ("cpu", "meta", "mps"):
            self._stream = torch.accelerator.current_stream(device)

    def _place_again(self) -> bool:
        """Put the weights of the last forward in place, and return whether nothing has changed since."""
        # The whole cost of a forward whose weights share their memory with the map's: it checks little.
        hook = self.hook
        if hook.tied_params_map:
            return False
        device = hook.device
        weights = hook.weights_map if self.own_map is None else self.weights()
        prefix = ""
        if type(weights) is PrefixedDataset:  # its look-up would be half of the cost
            prefix = weights.prefix
            weights = weights.dataset
        assert weights is not None
        try:
            for slot in self.slots:
                placeholder = slot.placeholder
                if (
                    slot.cached is None
                    or slot.cached_for is not device
                    or slot.store.get(slot.key) is not placeholder
                    or placeholder.__dict__.get("changes", 0) != slot.changes
                    or weights[prefix + slot.name] is not slot.source
                ):
                    return False
                slot.store[slot.key] = slot.placed = slot.cached
        except KeyError:
            return False
        self.resident = True
        return True

    def _share_stream(self) -> None:
        """Make this thread's stream wait for weights that another stream loaded, and tell the allocator of both."""
        if self._stream is None:
            return
        stream = torch.accelerator.current_stream(self._stream.device)
        if stream == self._stream:
            return
        stream.wait_stream(self._stream)
        for slot in self.slots:
            if slot.placed is not None and slot.placed.device == stream.device:
                slot.placed.record_stream(stream)

    def _place(self, device: torch.device | None, writable: bool) -> None:
        weights, tied = self.weights(), self.hook.tied_params_map
        for slot in self.slots:
            if not slot.is_ours:
                self._tie(slot)
        content = None if writable else self._prefetched(weights, device)
        store = weights.dataset if isinstance(weights, PrefixedDataset) else weights
        in_files = isinstance(store, OffloadedWeightsLoader) and bool(store.index)
        for number, slot in enumerate(self.slots):
            if not slot.is_ours:
                continue
            slot.refresh()
            if content is not None and self._is_current(content, number):
                value = content.sources[number]
                made = slot.adopted(content.tensors[number], value)
            else:
                value = self._looked_up(slot, weights)
                made = load_tied(slot, weights, value, device, tied) if tied else slot.loaded(weights, value, device)
            if in_files and (writable or not slot.is_parameter):
                made = slot.copied(made, value)
            slot.place(made, value, device)

    def _is_current(self, content: Weights, number: int) -> bool:
        """Return whether what was prefetched was made of a weight that was not replaced since."""
        assert self.binding is not None
        spec: TransferSpec = self.binding.block.source
        return spec.store.stored(spec.names[number]) is content.sources[number]

    def _looked_up(self, slot: Slot, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        try:
            return slot.stored_in(weights)
        except KeyError as failure:
            raise OffloadError(
                f"An offloaded weight is not in its weights map; got no {failure} for {slot.name!r} of "
                f"{type(self.module).__name__}. Pass a map that holds every tensor of the module."
            ) from failure

    def _tie(self, slot: Slot) -> bool:
        """Take over a tie that was made by hand, by assigning another weight's placeholder."""
        present = slot.store.get(slot.key)
        if not isinstance(present, OffloadedTensor):
            return False
        name = present.__dict__.get("weight_name", "?")
        weights = self.hook.weights_map
        known = isinstance(weights, PrefixedDataset) and name in weights.dataset
        if not known or present.__dict__.get("computed") or present.size() != slot.shape:
            raise OffloadError(
                "A parameter was made from an offloaded weight while it was away, and holds no values; got a parameter "
                f"made from {name!r} in the place of {slot.name!r} of {type(self.module).__name__}. Compute it under "
                "`align_module_device`, or tie and change weights before they are offloaded."
            )
        slot.take_placeholder(present, name)
        if self.binding is not None:
            self._leave_schedule(self.binding)  # it would load the previous weight
        return True

    def _prefetched(self, weights: Mapping[str, torch.Tensor], device: torch.device | None) -> Weights | None:
        """Take the weights from the schedule, if it has them."""
        binding = self.binding
        if binding is None:
            return None
        if weights is not binding.weights_map or device != binding.device:
            self._leave_schedule(binding)  # changed by hand: from now on they are loaded when needed
            return None
        # Acquired before anything is placed: when placing fails, `_unload` releases the block exactly once.
        content = binding.schedule.acquire(binding.block)
        binding.acquired = True
        return content

    def _leave_schedule(self, binding: PrefetchBinding) -> None:
        self.binding = None
        if binding.acquired:
            binding.acquired = False
            binding.schedule.release(binding.block)
        binding.schedule.forget(binding.block)

    def _unload(self, compare: bool = False) -> None:
        """Take the weights out; do nothing if they are offloaded."""
        tied = self.hook.tied_params_map
        # First, while the slots still know which copies they placed.
        if tied:
            drop_tied(tied, [slot.placed for slot in self.slots])
        copies: list[tuple[Slot, torch.Tensor, torch.Tensor]] = []
        for slot in self.slots:
            placed, slot.placed = slot.placed, None
            if placed is None:
                continue
            if slot.store.get(slot.key) is placed:
                slot.store[slot.key] = slot.placeholder
                # Written to in a file's map, which ends with this process and no copy of the model has.
                if slot.in_file and placed is slot.cached and placed._version:
                    slot.version, slot.value = 0, slot.source
                if slot.value is not None:
                    copies.append((slot, placed, slot.value))
            # Else the user assigned another tensor, and decides what becomes of the weight.
            slot.value = None
        self.resident = False
        self._stream = None
        if not copies and self.binding is None:
            return
        try:
            while copies:
                keep_written(self.module, self.weights(), *copies.pop(), compare)
        finally:
            # Last, because it may raise; by then the module is as it is between forwards. Nothing here may hold the
            # weights any more: the schedule fills their room with the next block's.
            placed = None
            copies.clear()
            binding = self.binding
            if binding is not None and binding.acquired:
                binding.acquired = False
                binding.schedule.release(binding.block)

    def restore(self) -> None:
        """Put the module's tensors back where they were; tensors that were empty before are empty again."""
        if self.binding is not None:
            self._leave_schedule(self.binding)
        self._unload()
        weights = self.weights()
        for slot in self.slots:
            if slot.is_ours or self._tie(slot):
                slot.refresh()
                restored = slot.restored(weights)
                if restored is not None:
                    slot.store[slot.key] = restored
            if slot.original is not None:
                forget(slot.original)
        residencies = self.module.__dict__[_KEY]
        residencies.remove(self)
        if not residencies:
            del self.module.__dict__[_KEY]


def _places(module: nn.Module, include_buffers: bool, recurse: bool) -> Iterator[tuple[str, Store, str]]:
    """Yield where the offloaded tensors sit: name, holding dict, key; non-persistent buffers are in no map and stay."""
    for path, owner in module.named_modules(remove_duplicate=False) if recurse else (("", module),):
        prefix = f"{path}." if path else ""
        away = [(cast(Store, owner._parameters), key) for key in owner._parameters]
        if include_buffers:
            away += [(owner._buffers, key) for key in owner._buffers if key not in owner._non_persistent_buffers_set]
        for store, key in away:
            if store[key] is not None:
                yield prefix + key, store, key
