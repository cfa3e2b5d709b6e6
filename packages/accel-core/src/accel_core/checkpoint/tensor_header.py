"""The header of a safetensors file: which tensors it holds and where they lie.

Format: https://github.com/huggingface/safetensors#format. What the `safetensors` package refuses is refused here, what
it accepts is read. The package itself cannot be asked: it parses a header only together with the file, which it opens
by path and, without NumPy, maps as private memory; the kernel refuses that for a file larger than what is free.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

import torch

from accel_core.errors import CheckpointDamagedError, CheckpointError

__all__ = ["DTYPES", "METADATA", "Header", "StoredTensor", "name_of_dtype", "read_header", "torch_shape"]

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

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST = 100_000_000  # the format's own bound
_MOST_EXTENT = 1 << 64
_DEEPEST = 127
_BYTES_PER_CONTAINER = 16
_UNUSUAL = re.compile(r"\\u[dD][89a-fA-F]|\d{309}|[eE]\+?\d{3}|-0(?![\d.eE])")
_SURROGATES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


class StoredTensor(NamedTuple):
    """Where one tensor lies in a file.

    Attributes:
        form: Its dtype, or the format's name for one that this torch has not.
        shape: Its shape in torch.
        start: First byte in the file.
        nbytes: How many bytes.
    """

    form: torch.dtype | str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype.

        Raises:
            CheckpointError: This torch has none of that name.
        """
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
    """What a safetensors file says of itself.

    Attributes:
        tensors: Its tensors by name, in the order in which they lie.
        metadata: Words that the writer noted.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def name_of_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of a dtype; `None` if it has none."""
    return _NAMES.get(dtype)


def read_header(descriptor: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open safetensors file; it may have at most 100 MB.

    Raises:
        CheckpointDamagedError: The file is truncated, or not in the format.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    try:
        if size < 8 or length > min(size - 8, _LONGEST):
            raise ValueError(f"{size} bytes that do not begin like a safetensors file")
        raw = os.pread(descriptor, length, 8)
        if len(raw) != length:
            raise ValueError("that it became shorter while it was read")
        return _parse(raw, size - 8 - length)
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError and JSONDecodeError are ValueErrors; both say where in the header they are.
        reason = "JSON that is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointDamagedError(
            f"The checkpoint file {os.fspath(path)!r} is damaged or in another format; got {reason}. "
            "Load another checkpoint."
        ) from error


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in torch of a stored tensor; 4-bit values are stored in pairs.

    Raises:
        ValueError: torch cannot hold a tensor of this shape.
    """
    if name == "F4":
        if not shape or shape[-1] % 2:
            raise ValueError(f"values of 4 bits in a last axis that is odd: {list(shape)}")
        return (*shape[:-1], shape[-1] // 2)
    return shape


class _Doubled(dict[str, Any]):
    """A JSON object that names a key more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def _parse(raw: bytes, room: int) -> Header:
    if raw.count(b"[") + raw.count(b"{") > len(raw) // _BYTES_PER_CONTAINER + 64:
        raise ValueError("a header of lists, where no tensor takes so few bytes")
    header = _load(raw.decode("utf-8"))
    if type(header) not in (dict, _Doubled):
        raise ValueError(f"a header that is a {type(header).__name__}")
    pairs: list[tuple[str, Any]] = header.pairs if isinstance(header, _Doubled) else list(header.items())
    noted = [value for name, value in pairs if name == METADATA]
    if len(noted) > 1:
        raise ValueError("metadata given twice")
    metadata = _metadata(noted[0]) if noted else {}
    # As the package reads it, the last one of several entries of a name counts, but each has to be well formed.
    entries = {name: (name, *_entry(name, value)) for name, value in pairs if name != METADATA}
    base = 8 + len(raw)
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, form, shape, start, stop in sorted(entries.values(), key=lambda entry: entry[3:]):
        if start != end or stop < start:
            raise ValueError(f"tensors that overlap or leave holes: {name!r} at byte {start} instead of {end}")
        if stop - start != _bytes_of(form, shape):
            raise ValueError(f"tensor {name!r} of shape {list(shape)} and {form} in {stop - start} bytes")
        seen = torch_shape(form, shape)
        if max(seen, default=0) >> 31 and stop == start:
            _check_empty(name, seen)
        tensors[name] = StoredTensor(DTYPES.get(form, form), seen, base + start, stop - start)
        end = stop
    if end != room:
        raise ValueError(f"{room} bytes of values where the header announces {end}")
    return Header(tensors, metadata)


def _load(text: str) -> Any:
    """Parse JSON as strictly as the format's own reader; Python's takes NaN, halves of characters, and any number."""
    hooks: dict[str, Any] = {}
    if _UNUSUAL.search(text):
        _check_escapes(text)
        hooks = {"parse_int": _number, "parse_float": _fraction}
    return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, **hooks)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else _Doubled(pairs)


def _constant(word: str) -> object:
    raise ValueError(f"the number {word}, which JSON has not")


def _number(digits: str) -> int | float:
    if digits == "-0":
        return -0.0
    return int(digits) if len(digits) < 300 else _fraction(digits)


def _fraction(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), -float("inf")):
        raise ValueError("a number that is out of range")
    return value


def _check_escapes(text: str) -> None:
    """Refuse halves of a character: an escape from D800 to DBFF that none from DC00 to DFFF follows, or the reverse."""
    high = -1
    for found in _SURROGATES.finditer(text):
        code = int(found[1], 16) if found[1] else 0
        follows = high == found.start()
        if follows != (0xDC00 <= code < 0xE000):
            raise ValueError("half of a character in a name")
        high = found.end() if 0xD800 <= code < 0xDC00 else -1
        if high >= 0 and text[high : high + 2] != "\\u":
            raise ValueError("half of a character in a name")


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(type(word) is str for word in value.values()):
        raise ValueError("metadata that is no table of words")
    return dict(value)


def _entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return what a header says of a tensor: dtype, shape, first byte, and the byte after its last one."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name!r} without its dtype, shape and data_offsets")
    if isinstance(entry, _Doubled):
        keys = [key for key, _ in entry.pairs]
        if any(keys.count(key) > 1 for key in ("dtype", "shape", "data_offsets")):
            raise ValueError(f"tensor {name!r} described twice")
    if len(entry) > 3 and _is_deep(entry):
        raise ValueError(f"tensor {name!r} described by JSON that is nested too deeply")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in _FORMS:
        raise ValueError(f"tensor {name!r} of a dtype that the format has not: {dtype!r:.40}")
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} whose shape or offsets are no list of numbers")
    if not all(type(number) is int and 0 <= number < _MOST_EXTENT for number in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} whose shape or offsets are no list of numbers")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_deep(value: Any) -> bool:
    """Return whether what a header says beyond the format is nested deeper than the format's reader goes."""
    level, depth = [value], 2
    while level:
        if depth > _DEEPEST:
            return True
        inner = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        level, depth = [item for item in inner if isinstance(item, (dict, list))], depth + 1
    return False


def _bytes_of(form: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes; -1 for a product that leaves 64 bits on the way, or parts of a byte."""
    count = 1
    for extent in (*shape, _FORMS[form][1]):
        count *= extent
        if count >= _MOST_EXTENT:
            return -1
    return count // 8 if count % 8 == 0 else -1


def _check_empty(name: str, shape: tuple[int, ...]) -> None:
    try:
        torch.empty(shape, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"tensor {name!r} of a shape that torch cannot hold: {list(shape)}") from error
