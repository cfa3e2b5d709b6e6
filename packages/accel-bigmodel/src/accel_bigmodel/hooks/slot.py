"""The place of one offloaded tensor in its module, and the tensors that alternate in it.

| state | what the module shows | where the value is | moves |
|---|---|---|---|
| away | its placeholder, which refuses writes | in the weights map | load: shared or copied |
| shared | a tensor over the map's memory, kept for the next load | there, writes too | unload: away |
| copied | a copy, on a device or of another dtype | there; writes in the copy | unload: away |
| tied by hand | another weight's placeholder | there, under that weight's name | load: as that weight |
| foreign | a tensor that somebody assigned | in the module | none until the placeholder is back |

What was written is put into the map when the weight goes away: of a copy, and of what shares the memory of a file.
Copies of a tied weight are noted by device, and all modules that share the weight compute with them.
"""

import threading
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import nn

from accel_bigmodel.memory import used_here
from accel_bigmodel.meta import as_parameter
from accel_bigmodel.offload.placeholders import OffloadedTensor, forbid_gradient, is_placeholder, placeholder_for
from accel_bigmodel.offload.store import OffloadedWeightsLoader, PrefixedDataset, differ
from accel_bigmodel.placement import TiedTensors, as_device, normal_tensors
from accel_core.errors import OffloadError
from accel_core.modules import packed

Store = dict[str, torch.Tensor | None]


def packed_key(name: str, suffix: str) -> str:
    """Name a stored part of a packed parameter: `""` is the weights themselves, other parts lie beside them."""
    if not suffix:
        return name
    path, _, _ = name.rpartition(".")
    return f"{path}.{suffix}" if path else suffix


class Slot:
    """One offloaded tensor: where it sits in its module, its placeholder, and the original if it still exists.

    Attributes:
        placed: The tensor that was put in its place, while the weights are in memory.
        tied_to: The name, in the whole model's weights, of the weight that somebody tied it to by assignment.
    """

    def __init__(self, name: str, store: Store, key: str, block: str) -> None:
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
            placeholder_for(tensor, name, block) if form is None else form.move(tensor, torch.device("meta"))
        )
        self.source: torch.Tensor | None = None
        self.cached: torch.Tensor | None = None
        self.cached_for: torch.device | None = None
        self.in_file = False  # whether what is cached shares its memory with a file's map
        self.placed: torch.Tensor | None = None
        self.value: torch.Tensor | None = None
        self.version: int | None = None
        self.tied_to: str | None = None
        self._read_placeholder()

    def __getstate__(self) -> dict[str, object]:
        """Leave out what a copy finds again by itself."""
        return {**self.__dict__, "source": None, "cached": None, "cached_for": None, "value": None, "version": None}

    def _read_placeholder(self) -> None:
        """Take over what the placeholder says of the weight: it may have been frozen or cast while it was away."""
        self.changes: int = self.placeholder.__dict__.get("changes", 0)
        self.dtype = self.placeholder.dtype
        self.requires_grad = self.placeholder.requires_grad
        self.source = self.cached = None

    def refresh(self) -> None:
        """Check whether the placeholder was changed since the last load."""
        # One look at a counter: asking a tensor subclass for its dtype goes through Python and takes microseconds.
        if self.placeholder.__dict__.get("changes", 0) != self.changes:
            self._read_placeholder()

    @property
    def is_ours(self) -> bool:
        """Whether the place holds the placeholder or what was loaded for it, and not a tensor from elsewhere."""
        # A parameter that was assigned to the module, or swapped in by `torch.func.functional_call`, is computed with
        # as it is; the weight comes again once its placeholder is back.
        present = self.store.get(self.key)
        return present is not None and (present is self.placeholder or present is self.placed)

    def take_placeholder(self, placeholder: OffloadedTensor, name: str) -> None:
        """Switch to another weight, whose placeholder was assigned here."""
        placeholder.__dict__.pop("computed", None)
        self.placeholder = placeholder
        self.tied_to = name
        self._read_placeholder()

    def place(self, made: torch.Tensor, value: torch.Tensor, device: torch.device | None) -> None:
        """Put a tensor in the placeholder's place."""
        self.store[self.key] = self.placed = made
        if made is self.cached:
            self.cached_for = device
            self.value = self.version = None
        else:
            self.source = self.cached = None
            # A copy: what is written to it has to be taken back before it is dropped.
            self.value = value
            self.version = None if made.is_inference() else made._version

    def loaded(
        self, weights: Mapping[str, torch.Tensor], value: torch.Tensor, device: torch.device | None
    ) -> torch.Tensor:
        """Return the tensor to compute with."""
        if value is self.source and self.cached is not None and device in (None, self.cached.device):
            return self.cached
        form = packed.find(self.placeholder)
        if form is not None:
            stored = {suffix: weights[packed_key(self.name, suffix)] for suffix in form.parts(self.placeholder)}
            return form.rebuild(self.placeholder, {**stored, "": value}, device or value.device)
        return self.adopted(value.detach().to(device=device, dtype=self.dtype), value)

    def parts(self) -> Sequence[str]:
        """Name the stored parts of the tensor: `""` for a plain one."""
        form = packed.find(self.placeholder)
        return ("",) if form is None else form.parts(self.placeholder)

    def adopted(self, data: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor to compute with, of data that is where it has to be."""
        if value is self.source and self.cached is not None and data is value:
            return self.cached
        if value.shape != self.shape:
            raise OffloadError(
                f"An offloaded weight does not have the shape of its parameter; got {tuple(value.shape)} for "
                f"{self.name!r}, which has {tuple(self.shape)}. Put a weight of that shape into the weights map."
            )
        if data.dtype != self.dtype:  # its transfer began before the model was cast
            data = data.to(self.dtype)
        made = self.wrapped(data.detach())
        # Kept for the next forward: it takes no memory of its own, nor address space, unless that is scarce.
        if share_memory(data, value) and not value.__dict__.get("is_piece"):
            self.source, self.cached = value, made
            self.in_file = "is_piece" in value.__dict__ and not made.is_inference()
        return made

    def copied(self, loaded: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a loaded tensor, or a copy if it shares its memory with a weight in a file's map."""
        if not loaded.numel() or not share_memory(loaded, value):
            return loaded
        return self.wrapped(loaded.detach().clone())

    def stored_in(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight as a map of the module's weights holds it, under the name that it is tied to.

        Raises:
            KeyError: When it does not hold the weight.
        """
        if self.tied_to is not None and isinstance(weights, PrefixedDataset):
            return weights.dataset[self.tied_to]
        return weights[self.name]

    def restored(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the tensor as the module had it, with its present value; one for all modules that share it."""
        notes = self.placeholder.__dict__
        shared: torch.Tensor | None = notes.get("_restored")
        if shared is not None:
            return shared
        made = self.original if self.tied_to is None else None
        if made is None and self.device.type == "meta":
            return None
        if made is None:
            made = self._rebuilt(weights)
        elif not made.is_meta and packed.find(made) is None:
            value = self.stored_in(weights)
            if not share_memory(value, made):  # the map has a newer value
                made.data = value.detach().to(device=made.device, dtype=self.dtype, copy=True)
            elif made.dtype != self.dtype:
                made.data = made.data.to(self.dtype)
            if made.requires_grad != self.requires_grad:
                made.requires_grad_(self.requires_grad)
        notes["_restored"] = made
        return made

    def _rebuilt(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make the tensor again on its device."""
        value = self.stored_in(weights)
        if packed.find(self.placeholder) is not None:
            return self.loaded(weights, value, self.device)
        with normal_tensors():
            # In the layout that it had, which files do not keep; dense, where values shared their memory.
            like = torch.empty_strided(self.shape, self.placeholder.stride(), dtype=self.dtype, device="meta")
            data = torch.empty_like(like, device=self.device)
            data.copy_(value.detach())
        if not self.is_parameter:
            return data
        return as_parameter(self.cls, data, self.requires_grad)

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


# The copies are noted in one map for all modules of a model, which several threads may run.
_lock = threading.Lock()


def load_tied(
    slot: Slot,
    weights: Mapping[str, torch.Tensor],
    value: torch.Tensor,
    device: torch.device | None,
    tied: TiedTensors,
) -> torch.Tensor:
    """Load a weight that other modules may have loaded already."""
    copies = tied.get(value.data_ptr()) if not value.is_meta else None
    if copies is None:
        return slot.loaded(weights, value, device)
    key = as_device(device) if device is not None else value.device
    with _lock:
        made = copies.get(key)
        # A view of the weight, such as its transpose, begins at the same address.
        is_view = made is not None and made.shape == value.shape and made.stride() != value.stride()
        if made is None or is_view or made.shape != slot.shape or made.dtype != slot.dtype:
            made = copies[key] = slot.loaded(weights, value, device)
    return used_here(made)


def drop_tied(tied: TiedTensors, dropped: Sequence[torch.Tensor | None]) -> None:
    """Forget copies of tied weights that a module releases; modules that still use them hold them."""
    with _lock:
        for copies in tied.values():
            for device in [key for key, copy in copies.items() if any(copy is tensor for tensor in dropped)]:
                del copies[device]


def keep_written(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    slot: Slot,
    placed: torch.Tensor,
    value: torch.Tensor,
    compare: bool,
) -> None:
    """Store a weight that was written to in a copy, which is about to be dropped."""
    if slot.version is None or packed.find(slot.placeholder) is not None:
        return
    # Batch normalization updates its statistics without counting it as a write.
    compare = compare or (module.training and not slot.is_parameter)
    if placed._version == slot.version and not (compare and differ(placed, value)):
        return
    with normal_tensors():
        now = weights.get(slot.name) if slot.tied_to is None else slot.stored_in(weights)
        if now is None or (now is not value and differ(now, value)):
            return  # the map was given a newer value meanwhile, which counts
        dataset = weights.dataset if isinstance(weights, PrefixedDataset) else weights
        target = dataset.state_dict if isinstance(dataset, OffloadedWeightsLoader) else dataset
        if not isinstance(target, MutableMapping):
            raise OffloadError(
                "An offloaded weight was written to, and its weights map cannot take the new value; got "
                f"{slot.name!r} of {type(module).__name__} in a {type(target).__name__}. Use a mutable "
                "mapping, or write to the weight before it is offloaded."
            )
        kept = placed.detach().to("cpu")
        if isinstance(weights, PrefixedDataset):
            for name in {*slot.placeholder.__dict__.get("names", ()), weights.prefix + slot.name}:
                if name in dataset:
                    target[name] = kept
        else:
            target[slot.name] = kept
