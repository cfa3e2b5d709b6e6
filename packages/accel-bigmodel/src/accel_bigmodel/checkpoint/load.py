"""A checkpoint loaded into a model, tensor by tensor, each straight to where it lives."""

import os
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_bigmodel.checkpoint.broadcast import open_on_rank0
from accel_bigmodel.checkpoint.read import Checkpoint, SafetensorsShard, Shard, open_checkpoint
from accel_bigmodel.device_map.check import (
    AnyDevice,
    check_device_map,
    check_devices,
    check_tied_parameters_on_same_device,
    device_of,
    in_names_of,
)
from accel_bigmodel.hooks.residency import packed_key
from accel_bigmodel.offload.store import OffloadedWeightsLoader, offload_weight, save_offload_index
from accel_bigmodel.placement import retie_parameters, set_module_tensor_to_device
from accel_core._records import record
from accel_core.errors import CheckpointMismatchError, OffloadError, OffloadFolderError
from accel_core.logging import get_logger
from accel_core.modules import packed
from accel_core.modules.sizes import as_dtype
from accel_core.modules.ties import find_tied_parameters
from accel_core.modules.traversal import get_non_persistent_buffers, owner_of
from accel_core.modules.unwrap import canonical_name

__all__ = ["LoadedKeys", "load_checkpoint_in_model", "load_offloaded_weights", "loading_index"]

logger = get_logger(__name__)

_INDEX = "_accel_offload_index"


class LoadedKeys(NamedTuple):
    """What did not match between a model and a checkpoint.

    Attributes:
        missing_keys: Names of the model that the checkpoint lacks.
        unexpected_keys: Names of the checkpoint that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@record
class _Target:
    """A tensor of the model that the checkpoint fills."""

    names: list[str]
    tensor: torch.Tensor
    device: AnyDevice
    dtype: torch.dtype | None
    stays: bool
    source: str = ""

    @property
    def dtype_on_disk(self) -> torch.dtype | None:
        """The dtype that the weight is read in from the disk; None as it is stored."""
        return self.dtype or (self.tensor.dtype if self.tensor.is_floating_point() else None)


@record
class _Plan:
    """What a load will do, found out before anything is changed."""

    targets: dict[str, _Target] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


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
) -> LoadedKeys:
    """Load a checkpoint into a model; each tensor goes straight to its device, and what is on "disk" stays in its file.

    Everything is checked first: when this raises a `CheckpointError`, the model is as it was.

    Args:
        model: The model, which may be empty.
        checkpoint: A weights file, an index (`.json`), or a folder with one of them.
        device_map: Devices by name of submodule or tensor; by default every tensor stays on the device it has, and
            empty ones go to the CPU.
        offload_folder: Where weights on "disk" are written that no safetensors file holds.
        dtype: The dtype that floating point weights are cast to; by default the model's own.
        offload_state_dict: Accepted: what goes to the CPU is mapped from its file and needs no room twice.
        offload_buffers: Whether buffers of parts on "disk" stay on disk too.
        keep_in_fp32_modules: Names of modules whose weights are kept in float32.
        offload_8bit_bnb: Whether packed 8-bit weights of parts on "cpu" and "disk" are packed first, then offloaded.
        strict: Whether missing and unexpected names are an error.
        full_state_dict: With `broadcast_from_rank0`: whether the checkpoint holds whole tensors.
        broadcast_from_rank0: Whether the first process reads and sends the tensors to all others.
        must_fill: Whether tensors that would be left empty, on the meta device, are an error.

    Returns:
        The names that the checkpoint lacks, and those that the model lacks.

    Raises:
        CheckpointMismatchError: When shapes differ, integers are stored for a floating point parameter, names differ
            with `strict`, or tensors are left empty with `must_fill`; all of them are listed.
        CheckpointError: When a file is missing, damaged or unsafe.
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
    if device_map is not None:
        device_map = in_names_of(model, device_map)
        check_device_map(model, device_map)
        check_devices(device_map)
    tied = find_tied_parameters(model)
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)
    source = open_on_rank0(checkpoint) if broadcast_from_rank0 and full_state_dict else open_checkpoint(checkpoint)
    plan = _plan(model, source, device_map, as_dtype(dtype), keep_in_fp32_modules or (), offload_buffers)
    if strict and (plan.missing or plan.unexpected):
        raise CheckpointMismatchError(
            f"Error(s) in loading state_dict for {type(model).__name__}: the names differ; got missing "
            f"{plan.missing} and unexpected {plan.unexpected}. Load a checkpoint of this model, or pass `strict=False`."
        )
    if must_fill:
        _check_filled(model, plan)
    _check_offload(plan, source, offload_folder, offload_8bit_bnb)
    index = _fill(model, source, plan, offload_folder, offload_8bit_bnb)
    if index:
        model.__dict__[_INDEX] = {**loading_index(model), **index}
    retie_parameters(model, tied)
    if plan.unexpected:
        logger.warning(
            "Some weights of the checkpoint at %s were not used when initializing %s: %s. This may or may not be an "
            "issue - make sure that the checkpoint does not have unnecessary parameters, or that the model definition "
            "correctly corresponds to the checkpoint.",
            checkpoint, type(model).__name__, plan.unexpected,
        )  # fmt: skip
    return LoadedKeys(plan.missing, plan.unexpected)


def _plan(
    model: nn.Module,
    source: Checkpoint,
    device_map: Mapping[str, AnyDevice] | None,
    dtype: object,
    keep_in_fp32: Sequence[str],
    offload_buffers: bool,
) -> _Plan:
    """Match the model's names with the checkpoint's; raises when a shape differs."""
    plan = _Plan()
    scratch = get_non_persistent_buffers(model, recurse=True, fqns=True)
    by_tensor: dict[int, _Target] = {}
    parameters = [(name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False)]
    buffers = [(name, tensor, True) for name, tensor in model.named_buffers(remove_duplicate=False)]
    names = set()
    wrong = []
    for name, tensor, is_buffer in (*parameters, *buffers):
        names.add(name)
        if is_buffer and name in scratch:
            continue
        target = by_tensor.get(id(tensor))
        device = tensor.device if device_map is None else device_of(name, device_map)
        if device_map is None and tensor.is_meta:
            device = "cpu"
        assert device is not None
        if target is not None and target.device == "disk":
            target.device = device  # tied, and needed in memory under another name
        if target is None:
            wanted = _dtype_for(name, tensor, dtype, keep_in_fp32)
            target = _Target([], tensor, device, wanted, is_buffer and not offload_buffers)
            by_tensor[id(tensor)] = target
        target.names.append(name)
        stored = None if target.source else source.name_of(name)
        if stored is not None:
            target.source = stored
            shape = source.shard_of(stored).shape(stored)
            if shape != tuple(tensor.shape) and packed.find(tensor) is None:
                wrong.append(f"{name}: {shape} in the checkpoint, {tuple(tensor.shape)} in the model")
            elif not is_buffer and _is_of_another_kind(source, stored, tensor):
                wrong.append(f"{name}: integers or complex numbers in the checkpoint, {tensor.dtype} in the model")
    for target in by_tensor.values():
        if target.source:
            plan.targets[target.source] = target
        else:
            plan.missing.extend(target.names)
    expected = {canonical_name(name) for name in names}
    parts = {
        packed_key(target.source, suffix)
        for target in plan.targets.values()
        if (form := packed.find(target.tensor)) is not None
        for suffix in form.parts(target.tensor)
    }
    plan.unexpected = [name for name in source if canonical_name(name) not in expected and name not in parts]
    if wrong:
        raise CheckpointMismatchError(
            f"The checkpoint's tensors are not the model's; got {len(wrong)} that differ: {'; '.join(wrong)}. Load a "
            "checkpoint of this architecture."
        )
    return plan


def _is_of_another_kind(source: Checkpoint, name: str, tensor: torch.Tensor) -> bool:
    """Return whether a checkpoint holds packed or complex weights for a plain parameter: cast, they would be others."""
    plain = tensor.is_floating_point() and packed.find(tensor) is None
    return plain and not source.shard_of(name).floating(name)


def _dtype_for(name: str, tensor: torch.Tensor, dtype: Any, keep_in_fp32: Sequence[str]) -> torch.dtype | None:
    if not tensor.is_floating_point() or dtype is None:
        return None
    parts = name.split(".")
    if any(kept in parts or kept in name for kept in keep_in_fp32):
        return torch.float32
    found: torch.dtype = dtype
    return found


def _check_filled(model: nn.Module, plan: _Plan) -> None:
    """Make sure that every tensor will have a value, in memory or on disk."""
    present = {name for target in plan.targets.values() for name in target.names} | loading_index(model).keys()
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta and name not in present]
    if left:
        raise CheckpointMismatchError(
            f"Some tensors of the model would be left empty; got no value for {', '.join(left)}. Load a checkpoint "
            "that holds them, or build the model with those tensors filled."
        )


def _check_offload(plan: _Plan, source: Checkpoint, offload_folder: str | os.PathLike[str] | None, packs: bool) -> None:
    """Make sure that what has to be written can be, before anything is changed."""
    written = [
        name
        for name, target in plan.targets.items()
        if target.device == "disk"
        and not target.stays
        and (
            not isinstance(source.shard_of(name), SafetensorsShard)
            or (packs and packed.find(target.tensor) is not None)
        )
    ]
    if not written:
        return
    if offload_folder is None:
        raise OffloadFolderError(
            "At least one of the model submodule will be offloaded to disk, and no safetensors file holds its weights; "
            f"got {len(written)} such, {written[0]!r} first, and no folder. Pass an `offload_folder`, or save the "
            "checkpoint as safetensors."
        )
    try:
        os.makedirs(offload_folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=offload_folder):
            pass
    except OSError as failure:
        raise OffloadError(
            f"The offload folder cannot be written; got {failure}. Choose an `offload_folder` that can be written."
        ) from failure


def _fill(
    model: nn.Module,
    source: Checkpoint,
    plan: _Plan,
    offload_folder: str | os.PathLike[str] | None,
    packs: bool,
) -> dict[str, Any]:
    """Put every tensor in its place; returns the index of what stays on disk."""
    index: dict[str, Any] = {}
    written: MutableMapping[str, Any] = {}
    for shard, names in source.names_by_shard():
        for name in names:
            target = plan.targets.get(name)
            if target is None:
                continue
            form = packed.find(target.tensor) if packs else None
            if target.device != "disk" or target.stays:
                _put_in_memory(model, shard, name, target, form)
            elif form is not None:
                assert offload_folder is not None
                index.update(_write_packed(shard.tensor(name), target, form, offload_folder, written))
            else:
                entry = _entry_on_disk(shard, name, target, offload_folder, written)
                index.update(dict.fromkeys(target.names, entry))
                for alias in target.names:
                    _recast(model, alias, target.dtype_on_disk)
        shard.close()
    if written:
        assert offload_folder is not None
        save_offload_index(written, offload_folder)
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
            entries[key] = {**written[key], "dat_file": _dat_file(offload_folder, key)}
    return entries


def _entry_on_disk(
    shard: Shard,
    name: str,
    target: _Target,
    offload_folder: str | os.PathLike[str] | None,
    written: MutableMapping[str, Any],
) -> dict[str, Any]:
    """Return where a weight is on disk: in its safetensors file, or else in the folder, where it is written."""
    dtype = target.dtype_on_disk
    if isinstance(shard, SafetensorsShard):
        stored = dtype or shard.file.entries[name].dtype
        return {
            "safetensors_file": os.path.abspath(shard.path),
            "weight_name": name,
            "dtype": str(stored).removeprefix("torch."),
        }
    assert offload_folder is not None
    tensor = shard.tensor(name)
    offload_weight(tensor if dtype is None else tensor.to(dtype), name, offload_folder, index=written)
    return {**written[name], "dat_file": _dat_file(offload_folder, name)}


def _dat_file(offload_folder: str | os.PathLike[str], key: str) -> str:
    return os.path.abspath(os.path.join(offload_folder, f"{key}.dat"))


def _put_in_memory(
    model: nn.Module, shard: Shard, name: str, target: _Target, form: packed.PackedParameter | None
) -> None:
    device = "cpu" if target.device == "disk" else target.device
    value = shard.tensor(name)
    if form is not None and device == "cpu":
        made = form.pack(target.tensor, value, torch.device("cpu"))
        for alias in target.names:
            owner, key = owner_of(model, alias)
            owner._parameters[key] = made
        return
    for alias in target.names:
        set_module_tensor_to_device(model, alias, device, value=value, dtype=target.dtype)
    if _is_copied(model, target.names[0], value):
        shard.done_with(name)


def _is_copied(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Return whether a tensor of a model surely has memory of its own, after it was given a value."""
    owner, key = owner_of(model, name)
    tensor: Any = owner._parameters.get(key, owner._buffers.get(key))
    if packed.find(tensor) is not None or hasattr(tensor, "device_mesh"):
        return False
    return bool(tensor.device != value.device or tensor.data_ptr() != value.data_ptr())


def _recast(model: nn.Module, name: str, dtype: torch.dtype | None) -> None:
    """Empty the place of a weight on disk, in the dtype that the weight will have."""
    owner, key = owner_of(model, name)
    tensor: Any = owner._parameters[key] if key in owner._parameters else owner._buffers[key]
    dtype = tensor.dtype if dtype is None else dtype
    if tensor.is_meta and tensor.dtype == dtype:
        return
    set_module_tensor_to_device(
        owner, key, "meta", value=torch.empty_like(tensor, dtype=dtype, device="meta"), dtype=dtype
    )


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
