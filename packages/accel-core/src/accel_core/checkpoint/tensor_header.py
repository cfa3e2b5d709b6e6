"""The header of a safetensors file: which tensors it holds and where they lie, as the package reads it."""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from accel_core.checkpoint.manifest import damaged_file, path_of
from accel_core.errors import CheckpointError

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of the format, and those of torch's dtypes."""

DTYPES: dict[str, torch.dtype] = {form: getattr(torch, name) for form, name in _NAMES.items() if hasattr(torch, name)}
"""Names that the safetensors format gives to dtypes, for those that this torch has."""

METADATA = "__metadata__"
"""The entry of a header that is not a tensor."""

FORMS = {dtype: name for name, dtype in DTYPES.items()}
"""The same names by dtype."""


class StoredTensor(NamedTuple):
    """Where one tensor lies in a file; its form is the format's name where this torch has no such dtype."""

    form: torch.dtype | str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        if isinstance(self.form, str):
            raise CheckpointError(
                f"A weights file holds values of a dtype that torch {torch.__version__} has not; got {self.form}. "
                "Convert the file, or install a torch that has the dtype."
            )
        return self.form

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.start + self.nbytes


class Header(NamedTuple):
    """What a safetensors file says of itself: tensors in the order in which they lie, and words of the writer."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(descriptor: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open safetensors file, which may have at most 100 MB.

    The package is not told where a tensor lies, but in which order they do, and that nothing is between them.
    """
    try:
        with safe_open(path_of(descriptor, path), "pt", backend="pread") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            entries = {name: (str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise damaged_file(path, str(error)) from error
    except MemoryError as error:  # the package maps the file while it reads the header
        raise CheckpointError(
            f"The address space of this process has no room for the weights file {os.fspath(path)!r}; got {error}. "
            "Raise `ulimit -v`, or split the file into shards."
        ) from error
    start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    tensors: dict[str, StoredTensor] = {}
    for name, (form, shape) in entries.items():
        bits = re.match(r"[A-Z]+(\d+)", form)  # which every name says but BOOL
        count = math.prod(shape) * (int(bits[1]) if bits else 8) // 8
        if form == "F4":  # torch counts the bytes that hold two values
            if not shape or shape[-1] % 2:
                raise damaged_file(path, f"values of 4 bits in a last axis that is odd: {list(shape)}")
            shape = (*shape[:-1], shape[-1] // 2)
        if not count:
            try:
                # A tensor without elements fills no bytes, so nothing else bounds its sizes.
                torch.empty(shape, device="meta")
            except (RuntimeError, TypeError, OverflowError) as error:
                raise damaged_file(path, f"a shape of {name!r} that torch cannot hold: {list(shape)}") from error
        tensors[name] = StoredTensor(DTYPES.get(form, form), shape, start, count)
        start += count
    return Header(tensors, metadata)
