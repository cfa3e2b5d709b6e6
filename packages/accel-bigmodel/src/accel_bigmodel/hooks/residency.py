"""Where the offloaded weights of one (hook, module) pair are, and every move from one place to another.

The state of the pair is who uses the weights: `users` lists the threads that run a forward, and the holder.

| state | event | then | what is done |
|---|---|---|---|
| away (no users) | `enter` | running | load, to be read |
| away | `hold` | held | load, to be written |
| running, held | `enter` | the same | this thread's stream waits for the stream that loaded |
| running | `leave` of the last user | away | unload |
| running | `hold` by another thread | held | load, to be written |
| held, no forward | `hold` | held | unload and compare, load, to be written |
| held, no forward | `release` | away | unload and compare |
| held, a forward runs | `release` | running | |
| any | a load fails | as before | unload, where nobody uses the weights |
| away | `restore` | none | the module's own tensors are back |

The state of one weight is what stands in its place in the module. A load and an unload move each weight:

| state | in its place | load | unload |
|---|---|---|---|
| away | its placeholder, which refuses writes | shared where the map has such memory, else copied | |
| shared | a tensor over the map's memory, kept for the next load | loaded again | away |
| copied | a tensor of its own: on a device, of another dtype | loaded again | away; what was written enters the map |
| tied by hand | another weight's placeholder | as that weight from now on | |
| foreign | a tensor that somebody assigned | left alone | left alone |

What is shared with a file's map is taken into the map as well when it was written to; where writes may come that torch
does not count (to be written, and buffers), it is copied. Copies of a tied weight are noted by device, and all modules
that share the weight compute with them.
"""

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from threading import get_ident
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from accel_bigmodel._torch import DisableTorchFunctionSubclass
from accel_bigmodel.memory import used_here
from accel_bigmodel.meta import as_parameter
from accel_bigmodel.offload.placeholders import (
    OffloadedTensor,
    forbid_gradient,
    forget,
    is_placeholder,
    placeholder_for,
)
from accel_bigmodel.offload.prefetch import TransferSpec, Weights
from accel_bigmodel.offload.schedule import Block, Schedule
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset, differ
from accel_bigmodel.placement import TiedTensors, in_normal_mode, normal_tensors
from accel_core._records import record
from accel_core.errors import OffloadError
from accel_core.modules import packed

_KEY = "_accel_residencies"
_HOLDER = 0  # no thread has this number

Store = dict[str, torch.Tensor | None]


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
                slot.shared = None


def packed_key(name: str, suffix: str) -> str:
    """Name a stored part of a packed parameter: `""` is the weights themselves, other parts lie beside them."""
    if not suffix:
        return name
    path, _, _ = name.rpartition(".")
    return f"{path}.{suffix}" if path else suffix


class Loaded(NamedTuple):
    """A weight as it stands in its place while it is in memory."""

    tensor: torch.Tensor
    value: torch.Tensor  # what the map held
    device: torch.device | None
    version: int | None  # torch's count of writes; None where what is written is in the map by itself


@record
class PrefetchBinding:
    """How the weights of a residency are prefetched."""

    schedule: Schedule[Weights]
    block: Block[Weights]
    weights_map: Mapping[str, torch.Tensor] | None  # the hook's when this was set up; with another one it is left
    device: torch.device


class Slot:
    """One offloaded tensor: where it sits in its module, its placeholder, and the original if it still exists.

    Attributes:
        placed: What was put in its place, while the weight is in memory.
        shared: What was placed last, if it shares the map's memory: it costs nothing, and may be placed again.
        tied_to: The name, in the whole model's weights, of the weight that somebody tied it to by assignment.
    """

    def __init__(self, name: str, store: Store, key: str, prefix: str, block: str) -> None:
        tensor = store[key]
        assert tensor is not None
        self.name = name
        self.store = store
        self.key = key
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.cls = nn.Parameter if is_placeholder(tensor) else type(tensor)
        self.device = tensor.device
        self.shape = tensor.shape
        self.original: torch.Tensor | None = None if is_placeholder(tensor) else tensor
        form = packed.find(tensor)
        self.placeholder: torch.Tensor = (
            placeholder_for(tensor, prefix + name, block) if form is None else form.move(tensor, torch.device("meta"))
        )
        self.placed: Loaded | None = None
        self.tied_to: str | None = None
        self.read_placeholder()

    def __getstate__(self) -> dict[str, object]:
        """Leave out what a copy makes again by itself."""
        return {**self.__dict__, "shared": None}

    def read_placeholder(self) -> None:
        """Take over what the placeholder says of the weight: it may have been frozen or cast while it was away."""
        with DisableTorchFunctionSubclass():  # through Python, each would take microseconds
            self.dtype, self.requires_grad = self.placeholder.dtype, self.placeholder.requires_grad
        self.shared: Loaded | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the place holds the placeholder or what was loaded for it, and not a tensor from elsewhere."""
        # A parameter that was assigned to the module, or swapped in by `torch.func.functional_call`, is computed with
        # as it is; the weight comes again once its placeholder is back.
        present = self.store.get(self.key)
        return present is self.placeholder or (self.placed is not None and present is self.placed.tensor)

    def parts(self) -> Sequence[str]:
        """Name the stored parts of the tensor: `""` for a plain one."""
        form = packed.find(self.placeholder)
        return ("",) if form is None else form.parts(self.placeholder)

    def loaded(
        self,
        store: Mapping[str, torch.Tensor],
        value: torch.Tensor,
        data: torch.Tensor | None,
        device: torch.device | None,
        writable: bool,
    ) -> Loaded:
        """Return the weight to compute with, of its value in a map and of data that a schedule brought, if it did."""
        if value.shape != self.shape:
            raise OffloadError(
                f"An offloaded weight does not have the shape of its parameter; got {tuple(value.shape)} for "
                f"{self.name!r}, which has {tuple(self.shape)}. Put a weight of that shape into the weights map."
            )
        # What a schedule brought is cast where its transfer began before the model was.
        data = (value if data is None else data).detach().to(device=device, dtype=self.dtype)
        shares = share_memory(data, value)
        in_files = isinstance(store, OffloadedWeightsLoader) and bool(store.index)
        if shares and in_files and (writable or not self.is_parameter):
            data, shares = data.clone(), False
        tensor = self.wrapped(data)
        counts = (in_files or not shares) and not tensor.is_inference()
        made = Loaded(tensor, value, device, tensor._version if counts else None)
        # It takes no memory of its own, nor address space, unless that is scarce.
        self.shared = made if shares and not value.__dict__.get("is_piece") else None
        return made

    def rebuilt(self, store: Mapping[str, torch.Tensor], name: str, device: torch.device | None) -> torch.Tensor:
        """Return a packed weight on a device, of its stored parts."""
        form = packed.find(self.placeholder)
        assert form is not None
        stored = {suffix: store[packed_key(name, suffix)] for suffix in form.parts(self.placeholder)}
        return form.rebuild(self.placeholder, stored, device or stored[""].device)

    def restored(self, store: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
        """Return the tensor as the module had it, with its present value; one for all modules that share it."""
        notes = self.placeholder.__dict__
        shared: torch.Tensor | None = notes.get("_restored")
        if shared is not None:
            return shared
        made = self.original if self.tied_to is None else None
        if made is None and self.device.type == "meta":
            return None
        if made is None:
            made = self._unloaded(store, name)
        elif not made.is_meta and packed.find(made) is None:
            value = store[name]
            if not share_memory(value, made):  # the map has a newer value
                made.data = value.detach().to(device=made.device, dtype=self.dtype, copy=True)
            elif made.dtype != self.dtype:
                made.data = made.data.to(self.dtype)
            if made.requires_grad != self.requires_grad:
                made.requires_grad_(self.requires_grad)
        notes["_restored"] = made
        return made

    def _unloaded(self, store: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Make the tensor again on its device."""
        if packed.find(self.placeholder) is not None:
            return self.rebuilt(store, name, self.device)
        with normal_tensors():
            # In the layout that it had, which files do not keep; dense, where values shared their memory.
            like = torch.empty_strided(self.shape, self.placeholder.stride(), dtype=self.dtype, device="meta")
            data = torch.empty_like(like, device=self.device)
            data.copy_(store[name].detach())
        return as_parameter(self.cls, data, self.requires_grad) if self.is_parameter else data

    def wrapped(self, data: torch.Tensor) -> torch.Tensor:
        """Return data as what the module had: a parameter, whose gradient is refused, or a buffer."""
        if not self.is_parameter:
            return data
        requires_grad = self.requires_grad and (data.is_floating_point() or data.is_complex())
        made = as_parameter(self.cls, data, requires_grad)
        if requires_grad:
            forbid_gradient(made, self.name)
        return made


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors begin at the same address."""
    return one.device == other.device and one.data_ptr() == other.data_ptr()


# The copies of tied weights are noted in one map for all modules of a model, which several threads may run.
_lock = threading.Lock()


class Residency:
    """The offloaded tensors of one module under one hook.

    The weights are in memory while some forward of the module runs, or while somebody holds them. Forwards are counted,
    not serialized: a forward that is entered while another one runs (recursion, another thread) finds the weights
    there, and the last one to leave sends them away.
    """

    def __init__(self, module: nn.Module, hook: OffloadingHook) -> None:
        self.module = module
        self.hook = hook
        self.own_map: OwnWeights | None = None
        self._begin()
        prefix = hook.weights_map.prefix if isinstance(hook.weights_map, PrefixedDataset) else ""
        block = prefix.rstrip(".") or type(module).__name__
        self.slots = [
            Slot(name, store, key, prefix, block)
            for name, store, key in _places(module, hook.offload_buffers, hook.place_submodules)
        ]
        module.__dict__.setdefault(_KEY, []).append(self)

    def _begin(self) -> None:
        # Held while weights come or go, never while a module computes: a forward that waits for threads of its own
        # cannot wait for itself.
        self.lock = threading.RLock()
        # A list, not a set: a forward that calls itself is in it more than once.
        self.users: list[int] = []
        self.binding: PrefetchBinding | None = None
        self._stream: torch.Stream | None = None
        self._changes = -1

    def __getstate__(self) -> dict[str, object]:
        """Leave the schedule and what belongs to threads out of copies and pickles."""
        return {name: getattr(self, name) for name in ("module", "hook", "own_map", "slots")}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Start without running forwards; a copy loads its weights when it needs them."""
        self.__dict__.update(state)
        self._begin()

    def offload(self) -> None:
        """Empty the module: its tensors are in the hook's weights map from now on, or in one that the hook gets.

        Raises:
            OffloadError: When the map lacks a weight; the module is as it was.
        """
        if self.hook.weights_map is None or isinstance(self.hook.weights_map, OwnWeights):
            if self.own_map is None:
                self.own_map = self._kept()
            self.hook.weights_map = self.own_map
        store, prefix = self.source()
        # All are looked up before the first one is emptied: a map that lacks a weight leaves the module as it was.
        originals = [
            (slot, slot.original, self._value(slot, store, prefix))
            for slot in self.slots
            if slot.original is not None and not slot.original.is_meta
        ]
        for slot, original, value in originals:
            # Keeping the original costs nothing while it shares its memory with the map's weight.
            if packed.find(original) is not None or not share_memory(value, original):
                slot.original = None
        for slot in self.slots:
            slot.store[slot.key], slot.placed = slot.placeholder, None
        self.users.clear()

    def _kept(self) -> OwnWeights:
        """Keep the module's own tensors on the CPU."""
        kept = OwnWeights()
        for slot in self.slots:
            tensor = slot.store[slot.key]
            assert tensor is not None
            form = packed.find(tensor)
            stored = {"": tensor} if form is None else form.unpack(tensor)
            kept.update({packed_key(slot.name, suffix): part.to("cpu") for suffix, part in stored.items()})
        return kept

    def source(self) -> tuple[Mapping[str, torch.Tensor], str]:
        """Return the mapping that holds the weights now, the hook's or the module's own, and their prefix there."""
        weights = self.hook.weights_map
        if isinstance(weights, PrefixedDataset):
            return weights.dataset, weights.prefix
        if self.own_map is not None and isinstance(weights, OwnWeights):
            weights = self.own_map  # one hook may serve several modules, and shows the weights of the last
        assert weights is not None
        return weights, ""

    def _value(self, slot: Slot, store: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        value = store.get(slot.tied_to or prefix + slot.name)
        if value is None:
            raise OffloadError(
                f"An offloaded weight is not in its weights map; got no {slot.tied_to or prefix + slot.name!r} for "
                f"{slot.name!r} of {type(self.module).__name__}. Pass a map that holds every tensor of the module."
            )
        return value

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the offloaded weights as they are stored, parts of packed ones each, by name in the module."""
        store, prefix = self.source()
        for slot in self.slots:
            if slot.is_ours or self._tie(slot):
                for suffix in slot.parts():
                    yield packed_key(slot.name, suffix), store[packed_key(slot.tied_to or prefix + slot.name, suffix)]

    def enter(self, *, writable: bool = False) -> None:
        """Begin a forward: the weights are in place until the last forward has left.

        Raises:
            OffloadError: When a weight cannot be loaded; no forward has begun then.
        """
        with self.lock:
            if not self.users:
                self._load(writable)
            elif self._stream is not None:
                self._share_stream(self._stream)
            self.users.append(get_ident())

    def leave(self) -> None:
        """End a forward that was begun on this thread."""
        with self.lock:
            self.users.remove(get_ident())
            if not self.users:
                self._unload()

    def hold(self) -> None:
        """Put the weights in place until `release`, to be read and written; inside a forward they already are."""
        with self.lock:
            if get_ident() in self.users:
                return
            if self.users == [_HOLDER]:
                self.release()  # what was written since is kept, and the map is read again
            self._load(writable=True)
            if _HOLDER not in self.users:
                self.users.append(_HOLDER)

    def release(self) -> None:
        """Take the weights out again, unless a forward runs; what was written to them stays."""
        with self.lock:
            if _HOLDER in self.users and get_ident() not in self.users:
                self.users.remove(_HOLDER)
                if not self.users:
                    self._unload(compare=True)

    def refresh(self) -> None:
        """Read again what the placeholders say of the weights."""
        self._changes = OffloadedTensor.changes
        for slot in self.slots:
            slot.read_placeholder()

    def _load(self, writable: bool) -> None:
        if self._changes != OffloadedTensor.changes:
            self.refresh()
        device, (store, prefix) = self.hook.device, self.source()
        copied = False
        try:
            content = None if writable or self.binding is None else self._prefetched(self.binding, device)
            for number, slot in enumerate(self.slots):
                if slot.store.get(slot.key) is not slot.placeholder and not slot.is_ours and not self._tie(slot):
                    continue
                if content is None or not self._is_current(content, number):
                    value, data = store.get(slot.tied_to or prefix + slot.name), None
                else:
                    value, data = content.sources[number], content.tensors[number]
                loaded = slot.shared
                if writable or loaded is None or loaded.value is not value or loaded.device is not device:
                    value = self._value(slot, store, prefix) if value is None else value
                    loaded = self._loaded(slot, value, data, device, writable)
                    copied = True
                slot.store[slot.key], slot.placed = loaded.tensor, loaded
        except BaseException:
            if not self.users:
                self._unload()
            raise
        # A CPU has no streams, and MPS one; elsewhere a thread may compute on another stream than the weights came by.
        has_streams = copied and device is not None and device.type not in ("cpu", "meta", "mps")
        self._stream = torch.accelerator.current_stream(device) if has_streams else None

    @in_normal_mode  # what is made outlives the forward: an inference tensor could never take part in a backward pass
    def _loaded(
        self,
        slot: Slot,
        value: torch.Tensor,
        data: torch.Tensor | None,
        device: torch.device | None,
        writable: bool,
    ) -> Loaded:
        """Return a weight to compute with; a copy that another module has of a tied one serves this one too."""
        store, prefix = self.source()
        if packed.find(slot.placeholder) is not None:
            return Loaded(slot.rebuilt(store, slot.tied_to or prefix + slot.name, device), value, device, None)
        tied = self.hook.tied_params_map
        copies = tied.get(value.data_ptr()) if tied and not value.is_meta else None
        if copies is None:
            return slot.loaded(store, value, data, device, writable)
        key = device or value.device
        with _lock:
            copy = copies.get(key)
            # A view of the weight, such as its transpose, begins at the same address.
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (slot.shape, slot.dtype, value.stride()):
                loaded = slot.loaded(store, value, data, device, writable)
                copies[key] = loaded.tensor
                return loaded
        return Loaded(used_here(copy), value, device, None if copy.is_inference() else copy._version)

    def _share_stream(self, loaded_on: torch.Stream) -> None:
        """Make this thread's stream wait for weights that another stream loaded, and tell the allocator of both."""
        stream = torch.accelerator.current_stream(loaded_on.device)
        if stream == loaded_on:
            return
        stream.wait_stream(loaded_on)
        for slot in self.slots:
            if slot.placed is not None and slot.placed.tensor.device == stream.device:
                slot.placed.tensor.record_stream(stream)

    def _is_current(self, content: Weights, number: int) -> bool:
        """Return whether what was prefetched was made of a weight that was not replaced since."""
        assert self.binding is not None
        spec: TransferSpec = self.binding.block.source
        return spec.store.stored(spec.names[number]) is content.sources[number]

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
        present.__dict__.pop("computed", None)
        slot.placeholder, slot.tied_to = present, name
        slot.read_placeholder()
        self._leave_schedule()  # it would load the previous weight
        return True

    def _prefetched(self, binding: PrefetchBinding, device: torch.device | None) -> Weights | None:
        """Take the weights from the schedule, if it has them."""
        if self.hook.weights_map is not binding.weights_map or device != binding.device:
            self._leave_schedule()  # changed by hand: from now on they are loaded when needed
            return None
        for slot in self.slots:
            if not slot.is_ours and self._tie(slot):
                return None
        # Acquired before anything is placed: when placing fails, `_unload` releases the block.
        return binding.schedule.acquire(binding.block)

    def _leave_schedule(self) -> None:
        binding, self.binding = self.binding, None
        if binding is not None:
            binding.schedule.release(binding.block)
            binding.schedule.forget(binding.block)

    def _unload(self, compare: bool = False) -> None:
        """Take the weights out; do nothing if they are offloaded."""
        tied = self.hook.tied_params_map
        # First, while the slots still know which copies they placed; modules that still use them hold them.
        if tied:
            dropped = [slot.placed.tensor for slot in self.slots if slot.placed is not None]
            with _lock:
                for copies in tied.values():
                    for device in [key for key, copy in copies.items() if any(copy is tensor for tensor in dropped)]:
                        del copies[device]
            del dropped
        counted: list[tuple[Slot, Loaded]] = []
        for slot in self.slots:
            placed, slot.placed = slot.placed, None
            # Else the user assigned another tensor, and decides what becomes of the weight.
            if placed is not None and slot.store.get(slot.key) is placed.tensor:
                slot.store[slot.key] = slot.placeholder
                if placed.version is not None:
                    counted.append((slot, placed))
        try:
            while counted:
                self._keep_written(*counted.pop(), compare)
        finally:
            # Last, because it may raise; by then the module is as it is between forwards. Nothing here may hold the
            # weights any more: the schedule fills their room with the next block's.
            placed = None
            counted.clear()
            if self.binding is not None:
                self.binding.schedule.release(self.binding.block)

    def _keep_written(self, slot: Slot, placed: Loaded, compare: bool) -> None:
        """Put a weight that was written to into the map, unless that was given a newer value meanwhile."""
        # Batch normalization updates its statistics without counting it as a write.
        compare = compare or (self.module.training and not slot.is_parameter)
        if placed.tensor._version == placed.version and not (compare and differ(placed.tensor, placed.value)):
            return
        with normal_tensors():
            store, prefix = self.source()
            name = slot.tied_to or prefix + slot.name
            now = store.get(name)
            if now is None:
                return
            # A value that was made for this load, by a cast, was written to as well: it tells nothing of the map.
            was_made = share_memory(placed.tensor, placed.value)
            if now is not placed.value and not was_made and differ(now, placed.value):
                return
            target = store.state_dict if isinstance(store, OffloadedWeightsLoader) else store
            if not isinstance(target, MutableMapping):
                raise OffloadError(
                    "An offloaded weight was written to, and its weights map cannot take the new value; got "
                    f"{slot.name!r} of {type(self.module).__name__} in a {type(target).__name__}. Use a mutable "
                    "mapping, or write to the weight before it is offloaded."
                )
            kept = placed.tensor.detach().to("cpu")
            in_model = isinstance(self.hook.weights_map, PrefixedDataset)
            for each in {*(slot.placeholder.__dict__.get("names", ()) if in_model else ()), name}:
                if each in store:
                    target[each] = kept

    def restore(self) -> None:
        """Put the module's tensors back where they were; tensors that were empty before are empty again."""
        self._leave_schedule()
        self._unload()
        store, prefix = self.source()
        self.refresh()
        for slot in self.slots:
            if slot.is_ours or self._tie(slot):
                restored = slot.restored(store, slot.tied_to or prefix + slot.name)
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
