"""Copies of the state in memory that is allocated once and used again for every save in the background."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from accel_core.checkpoint.tensor_file import storage_key
from accel_core.comm.tree import recursively_apply
from accel_core.mesh.tensor import local_part


class Buffers:
    """Host memory for snapshots, one buffer for each place in the state.

    A buffer is used again when the tensor at its place has the same shape and dtype as in the snapshot before. Pinned
    where the tensors come from an accelerator.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._sources: list[Tensor] = []

    def begin(self) -> None:
        """Start a snapshot: every buffer may be written again."""
        self._used.clear()
        self._copies.clear()
        self._sources.clear()

    def end(self) -> None:
        """Finish a snapshot: wait for copies under way and drop buffers that it did not need."""
        for device in {source.device for source in self._sources if _is_accelerators(source)}:
            torch.accelerator.synchronize(device)
        self._sources.clear()
        self._copies.clear()
        for place in self._buffers.keys() - self._used:
            del self._buffers[place]

    def copy(self, content: object, place: str) -> Any:
        """Return a copy of nested dicts, lists and tuples, with its tensors in reused buffers.

        Of a sharded tensor, it copies this rank's part, as a plain tensor. Tensors with the same memory and layout are
        copied once and stay shared.
        """
        numbers = itertools.count()
        return recursively_apply(lambda each: self._copy_tensor(each, f"{place}/{next(numbers)}"), content)

    def _copy_tensor(self, spread: Tensor, place: str) -> Tensor:
        tensor = local_part(spread.detach())
        key = storage_key(tensor)
        if key in self._copies:
            return self._copies[key]
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=_is_accelerators(tensor))
            self._buffers[place] = buffer
        buffer.copy_(tensor, non_blocking=buffer.is_pinned())
        self._used.add(place)
        self._copies[key] = buffer
        self._sources.append(tensor)
        return buffer


def _is_accelerators(tensor: Tensor) -> bool:
    """Return whether a tensor lies on the accelerator that torch pins memory for."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current is not None and current.type == tensor.device.type
