"""Loads weights, packed or not, into a model whose layers were replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_bigmodel import offload_weight, set_module_tensor_to_device
from accel_bigmodel.checkpoint.read import Checkpoint
from accel_bigmodel.device_map.check import device_of
from accel_bigmodel.hooks.residency import packed_key
from accel_bigmodel.placement import as_device
from accel_core._records import record
from accel_core.errors import CheckpointDamagedError, CheckpointMismatchError
from accel_core.modules import packed
from accel_core.modules.traversal import get_non_persistent_buffers, owner_of
from accel_core.tqdm import on_terminal
from accel_quant.config import BnbQuantizationConfig
from accel_quant.layers import is_named
from accel_quant.offload import write_parts
from accel_quant.statistics import faults


@record
class _Place:
    """A tensor of the model: its names, where it goes, and the dtype it gets."""

    names: list[str]
    tensor: torch.Tensor
    device: Any
    dtype: torch.dtype | None
    is_buffer: bool
    form: Any  # how it is packed, as `PackedParameter`; None for a plain tensor
    source: str = field(default="")


class WeightLoader:
    """Loads weights into a model, one after another, and indexes dtypes and shapes of what it wrote to the folder."""

    def __init__(
        self,
        model: nn.Module,
        config: BnbQuantizationConfig,
        places: Mapping[str, Any],
        offload_folder: str | os.PathLike[str] | None,
        shared: Sequence[Sequence[str]] = (),
    ) -> None:
        self.index: dict[str, Any] = {}
        self._others = {name: group for group in shared for name in group}
        self._model = model
        self._config = config
        self._folder: Any = offload_folder  # there is one where a weight goes to the disk
        self._devices = places
        self._places = self._list()

    def _list(self) -> list[_Place]:
        scratch = get_non_persistent_buffers(self._model, recurse=True, fqns=True)
        found: dict[int, _Place] = {}  # by identity: a tied tensor is loaded once
        for is_buffer, tensors in (
            (False, self._model.named_parameters(remove_duplicate=False)),
            (True, self._model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in tensors:
                device = device_of(name, self._devices)
                known = found.get(id(tensor))
                if known is not None:
                    known.names.append(name)
                    if str(known.device) == "disk" and device is not None:
                        known.device = device  # tied, and needed in memory under another name
                # No checkpoint has scratch buffers.
                elif device is not None and (name not in scratch or not tensor.is_meta):
                    form = packed.find(tensor)
                    found[id(tensor)] = _Place([name], tensor, device, self._dtype(name, tensor), is_buffer, form)
        return list(found.values())

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype | None:
        if not tensor.is_floating_point():
            return None
        kept = self._config.keep_in_fp32_modules or ()
        return torch.float32 if any(is_named(name, key) for key in kept) else self._config.torch_dtype

    def check(self, source: Checkpoint) -> None:
        """Find every weight of the model in a checkpoint; nothing is changed."""
        wrong: list[str] = []
        unsound: list[str] = []
        for place in self._places:
            names = (*place.names, *self._others.get(place.names[0], ()))
            place.source = next(filter(None, map(source.name_of, names)), "")
            if not place.source:
                if place.tensor.is_meta:  # a tensor with values may stay as the model's code made it
                    wrong.append(f"{place.names[0]} is missing")
                continue
            shape = source.shard_of(place.source).shape(place.source)
            if self._is_packed(place, source):
                lacking = self._lacking(place, source)
                wrong += lacking
                if not lacking:
                    unfit = faults(self._parts(place, source), place.tensor.shape)
                    unsound += [f"{place.source} has {fault}" for fault in unfit]
            elif tuple(shape) != tuple(place.tensor.shape):
                wrong.append(f"{place.source} has shape {tuple(shape)} for {tuple(place.tensor.shape)}")
            elif place.tensor.is_floating_point() and not source.shard_of(place.source).floating(place.source):
                wrong.append(f"{place.source} holds integers for {place.tensor.dtype}")
        if wrong:
            raise CheckpointMismatchError(
                f"The checkpoint does not fit the model; got {len(wrong)} differences: {'; '.join(wrong[:10])}. Load "
                "a checkpoint of this architecture, packed in this way or not packed."
            )
        if unsound:
            raise CheckpointDamagedError(
                f"Packed weights of the checkpoint do not fit their statistics; got {len(unsound)} differences: "
                f"{'; '.join(unsound[:10])}. Fetch or save the checkpoint again."
            )

    def _is_packed(self, place: _Place, source: Checkpoint) -> bool:
        """Return whether the checkpoint holds a weight that is already packed, in any way."""
        if place.form is None:
            return False
        path = place.source.rpartition(".")[0]
        marks = (f"{path}.SCB", f"{place.source}.absmax")  # scales of 8 and of 4 bits
        return any(mark in source for mark in marks)

    def _lacking(self, place: _Place, source: Checkpoint) -> list[str]:
        parts = [packed_key(place.source, suffix) for suffix in place.form.parts(place.tensor)]
        nested = packed_key(place.source, "weight.nested_absmax")  # bytes would be taken for scales
        if nested in source and nested not in parts:
            return [f"{place.source} is packed in another way: its scales are packed too"]
        return [f"{place.source} is packed in another way: {part} is missing" for part in parts if part not in source]

    def _parts(self, place: _Place, source: Checkpoint) -> dict[str, torch.Tensor]:
        """Return a packed weight and its statistics, by suffix."""
        names = {suffix: packed_key(place.source, suffix) for suffix in place.form.parts(place.tensor)}
        return {suffix: source.shard_of(name).tensor(name) for suffix, name in names.items()}

    def load_from_checkpoint(self, source: Checkpoint) -> None:
        """Take every weight from a checkpoint that was checked."""
        for place in on_terminal(self._places, "Quantizing"):
            if not place.source:
                self._put_plain(place, place.tensor)
            elif place.form is None:
                self._put_plain(place, source.own(place.source))
            elif self._is_packed(place, source):
                stored = self._parts(place, source)
                self._put_packed(place, place.form.rebuild(place.tensor, stored, self._device(place)))
            else:
                self._pack(place, source.shard_of(place.source).tensor(place.source))
        for shard in source.shards:
            shard.close()  # its map would keep the unpacked weights in memory

    def load_from_model(self) -> None:
        """Take every weight from the model itself."""
        for place in on_terminal(self._places, "Quantizing"):
            if place.form is None:
                self._put_plain(place, place.tensor.detach())
            elif place.tensor.is_floating_point():
                self._pack(place, place.tensor.detach())
            else:
                self._put_packed(place, place.form.move(place.tensor, self._device(place)))

    def _device(self, place: _Place) -> torch.device:
        return torch.device("cpu") if str(place.device) == "disk" else as_device(place.device)

    def _pack(self, place: _Place, value: torch.Tensor) -> None:
        cast = value if place.dtype is None else value.to(place.dtype)  # packing rounds in the dtype of its input
        self._put_packed(place, place.form.pack(place.tensor, cast, self._device(place)))

    def _put_packed(self, place: _Place, made: nn.Parameter) -> None:
        for name in place.names:
            # Also for a layer that is needed in memory under another name, because this one's hook reads the folder.
            if str(device_of(name, self._devices)) == "disk":
                write_parts(place.form, made, name, self._folder, self.index)
        if str(place.device) == "disk":
            made = place.form.move(made, torch.device("meta"))
        for name in place.names:
            owner, leaf = owner_of(self._model, name)
            owner._parameters[leaf] = made

    def _put_plain(self, place: _Place, value: torch.Tensor) -> None:
        cast = value.to(place.dtype) if place.dtype is not None and value.is_floating_point() else value
        if str(place.device) == "disk" and not place.is_buffer:  # hooks leave buffers in memory
            for name in place.names:
                offload_weight(cast, name, self._folder, index=self.index)
                set_module_tensor_to_device(self._model, name, "meta", value=cast.to("meta"), dtype=place.dtype)
            return
        for name in place.names:
            set_module_tensor_to_device(self._model, name, self._device(place), value=cast, dtype=place.dtype)
