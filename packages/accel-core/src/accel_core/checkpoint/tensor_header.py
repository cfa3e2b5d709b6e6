"""The header of a safetensors file: which tensors it holds and where they lie.

Format: https://github.com/huggingface/safetensors#format. The `safetensors` package writes nothing else than what is
read here, and refuses all that is refused. It cannot be asked: it parses a header only together with the file, which it
maps, without NumPy as private memory, and the kernel refuses that for a file larger than what is free.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import torch

from accel_core.checkpoint.manifest import damaged_file
from accel_core.errors import CheckpointError

__all__ = ["DTYPES", "FORMS", "LONGEST_HEADER", "METADATA", "Header", "StoredTensor", "each_name_once", "read_header"]

_FORMS: dict[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F4": ("float4_e2m1fn_x2", 4),
    "C64": ("complex64", 64),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}
"""For each name of the format: torch's name and the bits of one value."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, (attribute, _) in _FORMS.items() if hasattr(torch, attribute)
}
"""Names that the safetensors format gives to dtypes, for those that this torch has."""

METADATA = "__metadata__"
"""The entry of a header that is no tensor."""

FORMS = {dtype: name for name, dtype in DTYPES.items()}
"""The same names by dtype."""

LONGEST_HEADER = 100_000_000
"""The format's own bound, in bytes."""

_MOST_EXTENT = 1 << 64
_BYTES_PER_CONTAINER = 16


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
    """Read and check the header of an open safetensors file, which may have at most 100 MB."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    try:
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{size} bytes that do not begin like a safetensors file")
        raw = os.pread(descriptor, length, 8)
        if len(raw) != length:
            raise ValueError("that it became shorter while it was read")
        return _parse(raw, size - 8 - length)
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError and JSONDecodeError are ValueErrors; both say where in the header they are.
        reason = "JSON that is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged_file(path, reason) from error


def _parse(raw: bytes, room: int) -> Header:
    # Before it is parsed: empty lists take many times the memory of their two characters.
    if raw.count(b"[") + raw.count(b"{") > len(raw) // _BYTES_PER_CONTAINER + 64:
        raise ValueError("a header of lists, where no tensor takes so few bytes")
    header = json.loads(
        raw.decode("utf-8"),
        object_pairs_hook=_object,
        parse_constant=_refused,
        parse_float=_refused,
        parse_int=lambda digits: int(digits) if digits.isdecimal() else -1,
    )
    if type(header) is not dict:
        raise ValueError(f"a header that is a {type(header).__name__}")
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if type(metadata) is not dict or not all(type(word) is str for word in metadata.values()):
        raise ValueError("metadata that is not a table of words")
    base, end = 8 + len(raw), 0
    tensors: dict[str, StoredTensor] = {}
    entries = [(name, *_entry(name, value)) for name, value in header.items()]
    for name, form, shape, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        if start != end or stop < start:
            raise ValueError(f"tensors that overlap or leave holes: {name!r} at byte {start} instead of {end}")
        if stop - start != _bytes_of(form, shape):
            raise ValueError(f"tensor {name!r} of shape {list(shape)} and {form} in {stop - start} bytes")
        if form == "F4":  # torch counts the bytes that hold two values
            if not shape or shape[-1] % 2:
                raise ValueError(f"values of 4 bits in a last axis that is odd: {list(shape)}")
            shape = (*shape[:-1], shape[-1] // 2)
        if max(shape, default=0) >> 31 and stop == start:
            try:
                # A tensor without elements fills no bytes, so nothing else bounds its sizes.
                torch.empty(shape, device="meta")
            except (RuntimeError, TypeError, OverflowError) as error:
                raise ValueError(f"tensor {name!r} of a shape that torch cannot hold: {list(shape)}") from error
        tensors[name] = StoredTensor(DTYPES.get(form, form), shape, base + start, stop - start)
        end = stop
    if end != room:
        raise ValueError(f"{room} bytes of values where the header announces {end}")
    return Header(tensors, metadata)


def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which no two values have one name."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name that stands there twice")
    return made


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    "".join(name for name, _ in pairs).encode()  # half of a character is a ValueError
    return each_name_once(pairs)


def _refused(word: str) -> object:
    raise ValueError(f"the number {word}, which no header needs")


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return what a header says of a tensor: dtype, shape, first byte, and the byte after its last one."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} that is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in _FORMS:
        raise ValueError(f"tensor {name!r} of a dtype that the format has not: {dtype!r:.40}")
    lists = type(shape) is list and type(offsets) is list and len(offsets) == 2
    if not lists or not all(type(number) is int and 0 <= number < _MOST_EXTENT for number in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} whose shape or offsets are not a list of numbers")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _bytes_of(form: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes; -1 for a product that leaves 64 bits on the way, or parts of a byte."""
    count = 1
    for extent in (*shape, _FORMS[form][1]):
        count *= extent
        if count >= _MOST_EXTENT:
            return -1
    return count // 8 if count % 8 == 0 else -1
