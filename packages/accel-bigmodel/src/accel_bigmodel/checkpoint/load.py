"""Loads a checkpoint into a model, tensor by tensor, each straight to its device."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel_bigmodel.checkpoint.broadcast import open_on_rank0, together
from accel_bigmodel.checkpoint.files import find_files, holds_gguf
from accel_bigmodel.checkpoint.gguf import GgufShard, packed_while_loading
from accel_bigmodel.checkpoint.read import Checkpoint
from accel_bigmodel.checkpoint.shard import Shard
from accel_bigmodel.device_map.check import AnyDevice
from accel_bigmodel.device_map.placement import Placement
from accel_bigmodel.gguf.packed import GGUF, GgufWeight
from accel_bigmodel.hooks.residency import packed_key
from accel_bigmodel.offload.store import OffloadedWeightsLoader, offload_weight, save_offload_index
from accel_bigmodel.placement import retie_parameters, set_module_tensor_to_device
from accel_bigmodel.sizes import named_tensors
from accel_core._records import record
from accel_core.checkpoint.remote.weights import local_weights
from accel_core.errors import CheckpointMismatchError, OffloadError, OffloadFolderError, undone_by
from accel_core.logging import get_logger
from accel_core.modules import packed
from accel_core.modules.sizes import as_dtype
from accel_core.modules.traversal import get_non_persistent_buffers, owner_of
from accel_core.modules.unwrap import canonical_name
from accel_core.tqdm import on_terminal

logger = get_logger(__name__)

_INDEX = "_accel_offload_index"


class LoadedKeys(NamedTuple):
    """What did not match between a model and a checkpoint."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@record(frozen=True)
class LoadOptions:
    """How a checkpoint is loaded; see `load_checkpoint_in_model`."""

    folder: str | os.PathLike[str] | None = None
    dtype: str | torch.dtype | None = None
    in_fp32: Sequence[str] = ()
    offload_buffers: bool = False
    packs: bool = False
    strict: bool = False
    must_fill: bool = False
    dequantize: bool = False

    def dtype_for(self, name: str, tensor: torch.Tensor) -> torch.dtype | None:
        """Return the dtype that a tensor is cast to; None for the model's own."""
        if not tensor.is_floating_point() or self.dtype is None:
            return None
        return torch.float32 if any(kept in name for kept in self.in_fp32) else cast(torch.dtype, as_dtype(self.dtype))


@record
class _Target:
    """A tensor of the model that the checkpoint fills, once it is found there."""

    names: list[str]
    tensor: torch.Tensor
    device: AnyDevice
    dtype: torch.dtype | None
    stays: bool
    shard: Shard | None = None
    stored: str = ""

    @property
    def waits_on_disk(self) -> bool:
        """Whether the weight is not brought into memory."""
        return self.device == "disk" and not self.stays

    @property
    def dtype_on_disk(self) -> torch.dtype | None:
        """The dtype that the weight is read in from the disk; None for the stored one."""
        if isinstance(self.tensor, GgufWeight):
            return None
        return self.dtype or (self.tensor.dtype if self.tensor.is_floating_point() else None)

    def find(self, name: str, source: Checkpoint) -> str | None:
        """Look for the weight under one of its names; return what is wrong with the one found."""
        stored = source.name_of(name)
        if stored is None:
            return None
        self.stored, self.shard = stored, source.shard_of(stored)
        shape, plain = self.shard.shape(stored), packed.find(self.tensor) is None
        if (plain or isinstance(self.tensor, GgufWeight)) and shape != tuple(self.tensor.shape):
            return f"{name}: {shape} in the checkpoint, {tuple(self.tensor.shape)} in the model"
        # Packed or complex weights, cast for a plain parameter, would be others.
        is_float = isinstance(self.tensor, nn.Parameter) and self.tensor.is_floating_point()
        if plain and is_float and not self.shard.floating(stored):
            return f"{name}: integers or complex numbers in the checkpoint, {self.tensor.dtype} in the model"
        return None


@record
class _Plan:
    """What a load will do, decided before anything is changed: the targets of each file, in the file's order."""

    files: list[tuple[Shard, list[_Target]]]
    missing: list[str]
    unexpected: list[str]

    @property
    def targets(self) -> Iterator[_Target]:
        """All that will be filled."""
        return (target for _, targets in self.files for target in targets)


def loading_index(model: nn.Module) -> dict[str, Any]:
    """Return the index of the weights that loading left on disk."""
    found: dict[str, Any] = model.__dict__.get(_INDEX, {})
    return found


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, AnyDevice] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    must_fill: bool = False,
    dequantize: bool = False,
) -> LoadedKeys:
    """Load a checkpoint into a model; each tensor goes straight to its device, and what is on "disk" stays in its file.

    Everything is checked first: when this raises a `CheckpointError`, the model is as it was. When reading or writing
    fails later, a model keeps the values that it had; one that was empty may have some of its weights.

    Args:
        model: The model, which may be empty.
        checkpoint: A weights file (safetensors, GGUF, or of `torch.save`), an index (`.json`), or a folder with one; or
            the address of one in a store, which is fetched first.
        device_map: Devices by name of submodule or tensor; by default every tensor stays on the device it has, and
            empty ones go to the CPU.
        offload_folder: Where weights on "disk" are written that no safetensors file holds.
        dtype: The dtype that floating point weights are cast to; by default the model's own.
        offload_state_dict: Accepted: what goes to the CPU is mapped from its file and needs no room twice.
        offload_buffers: Whether buffers of parts on "disk" stay on disk too.
        keep_in_fp32_modules: Names of modules whose weights are kept in float32.
        offload_8bit_bnb: Whether packed 8-bit weights of parts on "cpu" and "disk" are packed first, then offloaded.
        strict: Whether missing and unexpected names are an error; otherwise they are a warning.
        full_state_dict: With `broadcast_from_rank0`: whether the checkpoint holds whole tensors.
        broadcast_from_rank0: Whether the first process reads and sends the tensors to all others.
        must_fill: Whether tensors that would be left empty, on the meta device, are an error.
        dequantize: Whether packed weights of a GGUF file are unpacked while they are loaded. By default they stay
            packed: their parameters are frozen, and each operation that computes with one unpacks it.

    Returns:
        The names that the checkpoint lacks, and those that the model lacks.

    Raises:
        CheckpointMismatchError: When shapes differ, integers are stored for a floating point parameter, names differ
            with `strict`, or tensors are left empty with `must_fill`; all of them are listed.
        CheckpointError: When a file is missing, damaged or unsafe, or a store fails for good.
        OffloadError: When weights must be written and `offload_folder` is missing or cannot be.
        DeviceMapError: When the device map misses a tensor, or has it on the disk and elsewhere.
        DeviceUnavailableError: When the device map names a device that is not here.

    Examples:
        >>> from accel import init_empty_weights
        >>> with init_empty_weights():
        ...     model = Net()
        >>> load_checkpoint_in_model(model, "checkpoint", device_map={"": "cpu"})
        LoadedKeys(missing_keys=[], unexpected_keys=[])
    """
    from_rank0 = broadcast_from_rank0 and full_state_dict
    checkpoint = local_weights(checkpoint)
    placement = Placement.standing(model) if device_map is None else Placement.of(model, device_map)
    options = LoadOptions(
        offload_folder,
        dtype,
        keep_in_fp32_modules or (),
        offload_buffers,
        offload_8bit_bnb,
        strict,
        must_fill,
        dequantize,
    )
    with packed_for(model, checkpoint, options, from_rank0=from_rank0):
        return load(placement, checkpoint, options, from_rank0=from_rank0)


def packed_for(
    model: nn.Module, checkpoint: Path, options: LoadOptions, *, from_rank0: bool
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a model has packed parameters where a GGUF file has packed weights that stay so."""
    if options.dequantize or from_rank0 or not holds_gguf(checkpoint):
        return contextlib.nullcontext()
    return packed_while_loading(model, GgufShard(find_files(checkpoint)[0], model), options.dtype_for)


def load(
    placement: Placement, checkpoint: str | os.PathLike[str], options: LoadOptions, *, from_rank0: bool
) -> LoadedKeys:
    """Load a checkpoint into a model whose tensors' places are known; raises as `load_checkpoint_in_model` does."""
    model = placement.model
    source = open_on_rank0(checkpoint, model, share=from_rank0, packed=not options.dequantize)
    with together("compare a checkpoint with the model", share=from_rank0):
        plan = _checked_plan(placement, source, options)
    kept = [(name, tensor, tensor.data) for name, tensor in named_tensors(model) if not tensor.is_meta]

    def put_back() -> None:
        for name, tensor, data in kept:
            store, key = _place_of(model, name)
            store[key] = tensor
            if type(tensor) is nn.Parameter:
                tensor.data = data

    with undone_by(put_back), together("load a checkpoint", share=from_rank0):  # a disk is full, say
        index = _fill(model, plan, options)
    if index:
        model.__dict__[_INDEX] = {**loading_index(model), **index}
    retie_parameters(model, placement.tied)
    if plan.missing:
        logger.warning(
            "The checkpoint at %s lacks weights of %s, which keep their values or stay empty: %s; got %s instead. Load "
            "a checkpoint of this model, or rename what it holds%s.",
            checkpoint, type(model).__name__, ", ".join(plan.missing), ", ".join(plan.unexpected) or "nothing",
            _prefix_between(plan),
        )  # fmt: skip
    elif plan.unexpected:
        logger.warning(
            "Some weights of the checkpoint at %s were not used when initializing %s: %s. This may or may not be an "
            "issue - make sure that the checkpoint does not have unnecessary parameters, or that the model definition "
            "correctly corresponds to the checkpoint.",
            checkpoint, type(model).__name__, plan.unexpected,
        )  # fmt: skip
    return LoadedKeys(plan.missing, plan.unexpected)


def _prefix_between(plan: _Plan) -> str:
    """Describe the prefix that all names of one side have and the other's lack; empty if they differ in more."""
    for longer, shorter, whose in (
        (plan.unexpected, plan.missing, "of the checkpoint"), (plan.missing, plan.unexpected, "of the model")
    ):  # fmt: skip
        for name in shorter[:1]:
            prefix = next((long.removesuffix(name) for long in longer if long.endswith(f".{name}")), None)
            if prefix is not None:
                return f": the names {whose} begin with {prefix!r}"
    return ""


def _checked_plan(placement: Placement, source: Checkpoint, options: LoadOptions) -> _Plan:
    """Return what a load will do, once all is checked that can be before anything is changed."""
    model, plan = placement.model, _plan(placement, source, options)
    if options.strict and (plan.missing or plan.unexpected):
        raise CheckpointMismatchError(
            f"Error(s) in loading state_dict for {type(model).__name__}: the names differ; got missing "
            f"{plan.missing} and unexpected {plan.unexpected}. Load a checkpoint of this model, or pass `strict=False`."
        )
    if options.must_fill:
        _check_filled(model, plan)
    _check_offload(plan, options)
    return plan


def _plan(placement: Placement, source: Checkpoint, options: LoadOptions) -> _Plan:
    """Match the model's names with the checkpoint's; raises when a shape differs."""
    targets, wrong = _targets(placement, source, options)
    if wrong:
        raise CheckpointMismatchError(
            f"The checkpoint's tensors are not the model's; got {len(wrong)} that differ: {'; '.join(wrong)}. Load a "
            "checkpoint of this architecture."
        )
    by_name = {target.stored: target for target in targets if target.stored}
    missing = [name for target in targets if not target.stored for name in target.names]
    expected = {canonical_name(name) for name, _ in named_tensors(placement.model)}
    parts = {
        packed_key(target.stored, suffix)
        for target in by_name.values()
        if (form := packed.find(target.tensor)) is not None
        for suffix in form.parts(target.tensor)
    }
    unexpected = [name for name, plain in source.canonical.items() if plain not in expected and name not in parts]
    # In the order of the files: on several ranks each asks the first one for the same tensor at the same time.
    files: dict[int, tuple[Shard, list[_Target]]] = {id(shard): (shard, []) for shard in source.shards}
    for name in source:
        if name in by_name:
            files[id(source.shard_of(name))][1].append(by_name[name])
    return _Plan(list(files.values()), missing, unexpected)


def _targets(placement: Placement, source: Checkpoint, options: LoadOptions) -> tuple[list[_Target], list[str]]:
    """List what can be filled, each tensor once, and what is wrong with its weight in the checkpoint."""
    model = placement.model
    scratch = get_non_persistent_buffers(model, recurse=True, fqns=True)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    targets: dict[int, _Target] = {}
    wrong = []
    for name, tensor in named_tensors(model):
        if name in scratch:
            continue
        device = placement.device_of(name)
        assert device is not None
        target = targets.get(id(tensor))
        if target is None:
            stays = name in buffers and not options.offload_buffers
            target = _Target([], tensor, device, options.dtype_for(name, tensor), stays)
            targets[id(tensor)] = target  # by identity: a tied tensor is filled once
        elif target.device == "disk":
            target.device = device  # tied, and needed in memory under another name
        target.names.append(name)
        if not target.stored and (fault := target.find(name, source)):
            wrong.append(fault)
    return list(targets.values()), wrong


def _check_filled(model: nn.Module, plan: _Plan) -> None:
    """Check that every tensor will have a value, in memory or on disk."""
    present = {name for target in plan.targets for name in target.names} | loading_index(model).keys()
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta and name not in present]
    if left:
        raise CheckpointMismatchError(
            f"Some tensors of the model would be left empty; got no value for {', '.join(left)}. Load a checkpoint "
            "that holds them, or build the model with those tensors filled."
        )


def _check_offload(plan: _Plan, options: LoadOptions) -> None:
    """Check that the offload folder can be written, before anything is changed."""
    written = [
        target.stored
        for target in plan.targets
        if target.waits_on_disk
        and (
            (target.shard is not None and target.shard.in_file(target.stored) is None)
            or (options.packs and packed.find(target.tensor) is not None)
        )
    ]
    if not written:
        return
    if options.folder is None:
        raise OffloadFolderError(
            "At least one of the model submodule will be offloaded to disk, and no safetensors file holds its weights; "
            f"got {len(written)} such, {written[0]!r} first, and no folder. Pass an `offload_folder`, or save the "
            "checkpoint as safetensors."
        )
    try:
        os.makedirs(options.folder, exist_ok=True)
        # Tried, because the mode of a folder does not tell that its mount is read-only.
        with tempfile.TemporaryFile(dir=options.folder):
            pass
    except OSError as failure:
        raise OffloadError(
            f"The offload folder cannot be written; got {failure}. Choose an `offload_folder` that can be written."
        ) from failure


def _fill(model: nn.Module, plan: _Plan, options: LoadOptions) -> dict[str, Any]:
    """Put every tensor in its place; return the index of what stays on disk."""
    index: dict[str, Any] = {}
    written: MutableMapping[str, Any] = {}
    for shard, targets in plan.files:
        for target in on_terminal(targets, "Loading weights"):
            form = packed.find(target.tensor) if options.packs else None
            if not target.waits_on_disk:
                _put_in_memory(model, shard, target, form)
            elif form is not None:
                assert options.folder is not None
                index.update(_write_packed(shard.tensor(target.stored), target, form, options.folder, written))
            else:
                entry, weight = _entry_on_disk(shard, target, options.folder, written)
                index.update(dict.fromkeys(target.names, entry))
                for alias in target.names:
                    _recast(model, alias, target.dtype_on_disk, weight)
        shard.close()
    if written:
        assert options.folder is not None
        save_offload_index(written, options.folder)
    return index


def _write_packed(
    value: torch.Tensor,
    target: _Target,
    form: packed.PackedParameter,
    offload_folder: str | os.PathLike[str],
    written: MutableMapping[str, Any],
) -> dict[str, Any]:
    """Pack a weight and write its parts under all of its names; returns their entries."""
    entries = {}
    made = form.pack(target.tensor, value, torch.device("cpu"))
    for suffix, part in form.unpack(made).items():
        for key in {packed_key(alias, suffix) for alias in target.names}:
            offload_weight(part, key, offload_folder, index=written)
            entries[key] = written[key] | _dat_file(offload_folder, key)
    return entries


def _entry_on_disk(
    shard: Shard,
    target: _Target,
    offload_folder: str | os.PathLike[str] | None,
    written: MutableMapping[str, Any],
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return where a weight is on disk, and the weight if it is packed.

    That is in its file, used in place, or else in the folder, where it is written.
    """
    name, dtype = target.stored, target.dtype_on_disk
    found = shard.in_file(name)
    if found is not None:
        stored = found.dtype if dtype is None or found.weight is not None else dtype
        return {**found.entry, "dtype": str(stored).removeprefix("torch.")}, found.weight
    assert offload_folder is not None
    tensor = shard.tensor(name)
    kept = tensor if isinstance(tensor, GgufWeight) else None
    plain = tensor if dtype is None else tensor.to(dtype)
    offload_weight(plain if kept is None else kept.raw, name, offload_folder, index=written)
    return written[name] | _dat_file(offload_folder, name), kept


def _dat_file(offload_folder: str | os.PathLike[str], key: str) -> dict[str, Any]:
    """Return where a weight was written, and what tells the file from one that another load writes there."""
    path = os.path.abspath(os.path.join(offload_folder, f"{key}.dat"))
    found = os.stat(path)
    return {"dat_file": path, "stamp": [found.st_size, found.st_mtime_ns]}


def _put_in_memory(model: nn.Module, shard: Shard, target: _Target, form: packed.PackedParameter | None) -> None:
    device = "cpu" if target.device == "disk" else target.device
    # What a form packs is copied there, and what goes to another device on its way.
    value = shard.own(target.stored) if form is None and str(device) == "cpu" else shard.tensor(target.stored)
    if form is not None and device == "cpu":
        made = form.pack(target.tensor, value, torch.device("cpu"))
        for alias in target.names:
            store, key = _place_of(model, alias)
            store[key] = made
        return
    is_packed = packed.find(target.tensor) is not None
    for alias in target.names if is_packed else target.names[:1]:
        set_module_tensor_to_device(model, alias, device, value=value, dtype=target.dtype)
    store, key = _place_of(model, target.names[0])
    made = store[key]
    if not is_packed:
        made = _taken_over(target.tensor, made)
        for alias in target.names:  # what was one tensor stays one
            store, key = _place_of(model, alias)
            store[key] = made
    if _is_copied(made, value):
        shard.done_with(target.stored)


def _place_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds a tensor of a model, and its key there."""
    owner, key = owner_of(model, name)
    return owner._buffers if key in owner._buffers else cast(Any, owner._parameters), key


def _taken_over(old: torch.Tensor, made: Any) -> Any:
    """Let a parameter that had values take new ones and stay itself: an optimizer or a wrapper may hold it."""
    if type(old) is not nn.Parameter or type(made) is not nn.Parameter or old.is_inference() or made.is_inference():
        return made
    try:
        old.data = made.data
    except RuntimeError:  # meta, and devices such as XLA's, whose tensors cannot take each other's place
        return made
    if old.grad is not None:
        old.grad = old.grad.to(made)
    return old


def _is_copied(tensor: Any, value: torch.Tensor) -> bool:
    """Return whether a tensor is known to own its memory, after it was given a value."""
    if packed.find(tensor) is not None or hasattr(tensor, "device_mesh"):
        return False
    return bool(tensor.device != value.device or tensor.data_ptr() != value.data_ptr())


def _recast(model: nn.Module, name: str, dtype: torch.dtype | None, weight: torch.Tensor | None) -> None:
    """Replace a weight on disk by an empty tensor, in the dtype that the weight will have, packed if it will be."""
    store, key = _place_of(model, name)
    tensor = store[key]
    dtype = tensor.dtype if dtype is None else dtype
    if weight is not None:
        store[key] = GGUF.move(weight.to(dtype), torch.device("meta"))
        return
    if tensor.is_meta and tensor.dtype == dtype:
        return
    value = torch.empty_like(tensor, dtype=dtype, device="meta")
    set_module_tensor_to_device(model, name, "meta", value=value, dtype=dtype)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights of an offload folder into a model, onto the CPU.

    Args:
        model: The model.
        index: Entries by weight name; nothing is loaded without.
        offload_folder: The folder with the `.dat` files.

    Examples:
        >>> import json
        >>> from accel import offload_state_dict
        >>> offload_state_dict("loaded", model.state_dict())
        >>> with open("loaded/index.json") as file:
        ...     load_offloaded_weights(model, json.load(file), "loaded")
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])
