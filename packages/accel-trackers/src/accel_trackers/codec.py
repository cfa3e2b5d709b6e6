"""Any Python value as JSON and back: the notation of spool files, and of what a flat configuration cannot show.

Whatever JSON has stays as it is. The rest becomes a mapping with one key that begins with `$`. Values of classes that
reading back must not import (enumerations, dataclasses, anything else) come back as `Described`.
"""

from __future__ import annotations

import base64
import ctypes
import datetime
import decimal
import enum
import json
import math
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from accel_core._records import record
from accel_trackers.nest import Kind, Path, walk

__all__ = ["Described", "Json", "decode", "describe", "dumps", "encode", "loads", "type_name"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_MOST_BITS = 10_000
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()  # what this torch has, and no quantized ones, which no bytes restore
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_ARRAY_KINDS = "?biufcSUMm"


@record(frozen=True)
class Described:
    """What is known about a value whose class is not imported when it is read back."""

    type: str  # dotted name of its class
    kind: str  # `enum`, `dataclass` or `repr`
    content: object  # for an enumeration its member's name and value, for a dataclass its fields, else its text


def dumps(value: object) -> str:
    """Write a value as one line of JSON; never raises."""
    return json.dumps(encode(value), ensure_ascii=True, separators=(",", ":"))


def loads(line: str) -> Any:
    """Read what `dumps` wrote.

    Raises:
        ValueError: The line is not JSON, or not of this notation.
    """
    return decode(json.loads(line))


def type_name(value: object) -> str:
    """Return the dotted name of a value's class."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(value: object) -> str:
    """Return the text of a value, whatever its `__repr__` does."""
    try:
        text = repr(value)
    except BaseException as error:  # a user's __repr__ may raise anything, and logging must not
        return f"<{type_name(value)} whose text raises {type(error).__name__}>"
    return text if isinstance(text, str) else f"<{type_name(value)}>"


def encode(value: object) -> Json:
    """Turn a value into what `json` can write."""
    return walk(value, _encode_leaf, _encode_container)


def _encode_container(_: Path, value: object, kind: Kind, items: list[tuple[object, Json]]) -> Json:
    if kind == "list":
        return [item for _, item in items]
    if kind == "tuple":
        return {"$tuple": [item for _, item in items]}
    plain = {key: item for key, item in items if type(key) is str and (kind == "dataclass" or key[:1] != "$")}
    if kind == "dataclass":
        return {"$dataclass": type_name(value), "fields": plain}
    return plain if len(plain) == len(items) else {"$dict": [[encode(key), item] for key, item in items]}


def _encode_leaf(_: Path, value: object, above: tuple[int, ...]) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value  # type: ignore[return-value]
    if isinstance(value, int) and kind is int:
        # Python limits decimal digits it reads.
        return value if value.bit_length() < _MOST_BITS else {"$int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if id(value) in above:  # it contains itself
        return {"$repr": "...", "type": type_name(value)}
    try:
        return _encode_object(value, (*above, id(value)))
    except Exception:
        # A library's object may refuse to be read; the spool then has its text, as for any class it does not know.
        return {"$repr": describe(value), "type": type_name(value)}


def _encode_object(value: Any, above: tuple[int, ...]) -> Json:
    kind = type(value)
    if isinstance(value, enum.Enum):
        member = walk(value.value, _encode_leaf, _encode_container, above=above)
        return {"$enum": type_name(value), "name": value.name, "value": member}
    if kind in (set, frozenset):
        members = [walk(item, _encode_leaf, _encode_container, above=above) for item in value]
        return {"$set" if kind is set else "$frozenset": sorted(members, key=json.dumps)}  # the same text every time
    for match, tag, write in _LEAVES:
        if isinstance(value, match) and (kind is match or match in _OPEN):
            return {tag: write(value)}
    # Of other classes nobody knows what bytes mean.
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return {"$tensor": _encode_tensor(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return {"$array": _encode_array(value)}
    return {"$repr": describe(value), "type": type_name(value)}


def _encode_tensor(tensor: torch.Tensor) -> Json:
    whole = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if whole.numel() and not whole.data_ptr():  # fake and functional tensors have no bytes to copy
        raise ValueError("a tensor without memory")
    data = ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.numel() else b""
    return {
        "dtype": str(whole.dtype).removeprefix("torch."),
        "shape": list(whole.shape),
        "data": base64.b64encode(data).decode(),
    }


def _decode_tensor(written: dict[str, Any]) -> torch.Tensor:
    dtype = _dtype(written["dtype"])
    shape, data = _shape(written["shape"]), bytearray(_bytes(written["data"]))
    # Checked here and not by torch: a shape without data would expose uninitialized memory.
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} and {dtype} with {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)  # it refuses some dtypes


def _encode_array(array: Any) -> Json:
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
        "scalar": not hasattr(array, "setflags") or type(array).__name__ != "ndarray",
    }


def _decode_array(written: dict[str, Any]) -> object:
    import numpy

    name = written["dtype"]
    if not isinstance(name, str) or name.lstrip("<>=|")[:1] not in _ARRAY_KINDS or "," in name:
        raise ValueError(f"an array of dtype {name!r}")
    dtype, shape, data = numpy.dtype(name), _shape(written["shape"]), _bytes(written["data"])
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} and {dtype} with {len(data)} bytes")
    array = numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()
    return array[()] if written["scalar"] else array  # NumPy's scalars are not arrays of no dimension


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _shape(sizes: list[int]) -> list[int]:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"a shape {sizes!r}")
    return sizes


def _dtype(name: str) -> torch.dtype:
    # Looked up in a closed list: as an attribute of torch, the name could be any of its functions.
    if name not in _DTYPES:
        raise ValueError(f"a dtype {name!r}")
    return _DTYPES[name]


_LEAVES: list[tuple[type, str, Callable[[Any], Json]]] = [
    (pathlib.PurePath, "$path", str),
    (bytes, "$bytes", lambda value: base64.b64encode(value).decode()),
    (complex, "$complex", lambda value: [repr(value.real), repr(value.imag)]),
    (decimal.Decimal, "$decimal", str),
    (datetime.datetime, "$datetime", lambda value: [value.isoformat(), value.fold]),
    (datetime.date, "$date", lambda value: value.isoformat()),
    (datetime.timedelta, "$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    (uuid.UUID, "$uuid", str),
    (range, "$range", lambda value: [value.start, value.stop, value.step]),
    (torch.dtype, "$dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "$device", str),
    (torch.Size, "$size", list),
]
_OPEN = (pathlib.PurePath, torch.dtype)

_READERS: dict[str, Callable[[Any], object]] = {
    "$float": float,
    "$int": lambda digits: int(digits, 16),
    "$path": pathlib.Path,
    "$bytes": _bytes,
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "$decimal": decimal.Decimal,
    "$datetime": lambda parts: datetime.datetime.fromisoformat(parts[0]).replace(fold=parts[1]),
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$uuid": uuid.UUID,
    "$range": lambda parts: range(*parts),
    "$dtype": _dtype,
    "$device": torch.device,
    "$size": lambda sizes: torch.Size(_shape(sizes)),
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$tuple": lambda items: tuple(map(_decode, items)),
    "$set": lambda items: set(map(_decode, items)),
    "$frozenset": lambda items: frozenset(map(_decode, items)),
    "$dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
}


def decode(written: Json) -> Any:
    """Turn what `encode` gave back into the value.

    Raises:
        ValueError: A mapping begins with `$` and is not of this notation, or something is nested too deep to be read.
    """
    try:
        return _decode(written)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Any error of the readers above; RecursionError is a RuntimeError.
        raise ValueError(f"not the notation of a spool file: {error}") from error


def _decode(written: Json) -> Any:
    if isinstance(written, list):
        return [_decode(item) for item in written]
    if not isinstance(written, Mapping):
        return written
    tag = next(iter(written), "")
    if not tag.startswith("$"):  # names of users that do are written as "$dict"
        return {sys.intern(key): _decode(item) for key, item in written.items()}  # names repeat in every line
    if tag == "$enum":
        return Described(str(written[tag]), "enum", (written["name"], _decode(written["value"])))
    if tag == "$dataclass":
        fields = written["fields"]
        if not isinstance(fields, dict):
            raise ValueError(f"the fields of a dataclass as {type(fields).__name__}")
        return Described(str(written[tag]), "dataclass", {key: _decode(item) for key, item in fields.items()})
    if tag == "$repr":
        return Described(str(written["type"]), "repr", written[tag])
    if tag not in _READERS:
        raise ValueError(f"unknown notation {tag!r}; this version knows {sorted(_READERS)}")
    return _READERS[tag](written[tag])
