"""Digests of what a script holds: any nest of values, and the states of generators."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_core.comm.transport import memory_of
from accel_core.mesh.tensor import local_part


def random_states() -> dict[str, str]:
    """Return a digest of the state of each library's default generator; empty where NumPy is not loaded."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": digest(torch.get_rng_state()),
        "Python": digest(random.getstate()),
        "NumPy": digest(numpy.random.get_state()) if numpy is not None else "",
    }


def digest(value: object) -> str:
    """Return a checksum of what a nest holds: bytes of tensors and arrays, the text of anything else."""
    state = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            plain = local_part(leaf.detach()).cpu().contiguous()
            state.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            state.update(memory_of(plain))
        else:
            state.update(re.sub(r" at 0x[0-9a-f]+", "", f"{leaf!r},").encode())  # the address says nothing
    return state.hexdigest()


def _leaves(value: Any, above: tuple[object, ...] = ()) -> Iterator[object]:
    if any(value is each for each in above):
        return
    above = (*above, value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner, above)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, above)
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        # The text of an array leaves out digits, and most elements of a large one.
        yield from (value.dtype.str, value.shape, value.tolist())
    elif isinstance(value, (Tensor, type, enum.Enum)):
        yield value
    elif dataclasses.is_dataclass(value):  # whose fields may be in slots
        yield from _leaves([getattr(value, field.name) for field in dataclasses.fields(value)], above)
    elif getattr(value, "__dict__", None):
        yield type(value).__qualname__
        yield from _leaves(vars(value), above)
    else:
        yield value
