"""Any Python value as JSON and back: the notation of spool files and of what a flat configuration cannot show.

Whatever JSON has stays as it is. The rest becomes a mapping with one key that begins with `$`. Values of classes that
reading back must not import (enumerations, dataclasses, anything else) come back as `Described`.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_core._records import record

__all__ = ["Described", "decode", "describe", "dumps", "encode", "loads", "type_name"]

_DEEPEST = 100


@record(frozen=True)
class Described:
    """What is known of a value whose class is not imported when it is read back.

    Attributes:
        type: Dotted name of its class.
        kind: `enum`, `dataclass` or `repr`.
        content: For an enumeration its member's name and value, for a dataclass its fields, else its text.
    """

    type: str
    kind: str
    content: Any


def dumps(value: Any) -> str:
    """Write a value as one line of JSON; never raises."""
    return json.dumps(encode(value), ensure_ascii=True, separators=(",", ":"))


def loads(line: str) -> Any:
    """Read what `dumps` wrote.

    Raises:
        ValueError: The line is not JSON.
    """
    return decode(json.loads(line))


def type_name(value: Any) -> str:
    """Return the dotted name of a value's class."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(value: Any) -> str:
    """Return the text of a value, whatever its `__repr__` does."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type_name(value)} whose text raises {type(error).__name__}>"
    return text if isinstance(text, str) else f"<{type_name(value)}>"


def encode(value: Any) -> Any:
    """Turn a value into what `json` can write.

    Args:
        value: Anything.

    Returns:
        None, booleans, numbers, texts, lists and mappings with text keys. Nothing raises: what cannot be taken apart
        is written as its class and text.
    """
    return _encode(value, ())


def _encode(value: Any, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if id(value) in above or len(above) >= _DEEPEST:
        return {"$repr": "..." if id(value) in above else describe(value), "type": type_name(value)}
    try:
        return _encode_object(value, (*above, id(value)))
    except Exception:
        return {"$repr": describe(value), "type": type_name(value)}


def _encode_object(value: Any, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return {"$enum": type_name(value), "name": value.name, "value": _encode(value.value, above)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, above)
    if kind is list:
        return [_encode(item, above) for item in value]
    if kind is tuple:
        return {"$tuple": [_encode(item, above) for item in value]}
    if kind in (set, frozenset):
        members = sorted((_encode(item, above) for item in value), key=json.dumps)
        return {"$set" if kind is set else "$frozenset": members}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _encode(getattr(value, field.name), above) for field in dataclasses.fields(value)}
        return {"$dataclass": type_name(value), "fields": fields}
    for match, tag, write in _LEAVES:
        if isinstance(value, match) and (kind is match or match in _OPEN):
            return {tag: write(value)}
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return {"$tensor": _encode_tensor(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return {"$array": _encode_array(value)}
    return {"$repr": describe(value), "type": type_name(value)}


def _encode_mapping(value: Mapping[Any, Any], above: tuple[int, ...]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, above) for key, item in value.items()}
    return {"$dict": [[_encode(key, above), _encode(item, above)] for key, item in value.items()]}


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    whole = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if whole.numel() and not whole.data_ptr():
        raise ValueError("a tensor without memory")
    data = ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.numel() else b""
    return {
        "dtype": str(whole.dtype).removeprefix("torch."),
        "shape": list(whole.shape),
        "data": base64.b64encode(data).decode(),
    }


def _decode_tensor(written: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, written["dtype"])
    data = bytearray(base64.b64decode(written["data"]))
    if not data:
        return torch.empty(written["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(written["shape"])


def _encode_array(array: Any) -> dict[str, Any]:
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
        "scalar": not hasattr(array, "setflags") or type(array).__name__ != "ndarray",
    }


def _decode_array(written: dict[str, Any]) -> Any:
    import numpy

    flat = numpy.frombuffer(base64.b64decode(written["data"]), dtype=numpy.dtype(written["dtype"]))
    array = flat.reshape(written["shape"]).copy()
    return array[()] if written["scalar"] else array


_LEAVES: list[tuple[type, str, Callable[[Any], Any]]] = [
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

_READERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$path": pathlib.Path,
    "$bytes": base64.b64decode,
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "$decimal": decimal.Decimal,
    "$datetime": lambda parts: datetime.datetime.fromisoformat(parts[0]).replace(fold=parts[1]),
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$uuid": uuid.UUID,
    "$range": lambda parts: range(*parts),
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
    "$size": torch.Size,
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$tuple": lambda items: tuple(map(decode, items)),
    "$set": lambda items: set(map(decode, items)),
    "$frozenset": lambda items: frozenset(map(decode, items)),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
}


def decode(written: Any) -> Any:
    """Turn what `encode` gave back into the value.

    Args:
        written: JSON values.

    Returns:
        An equal value; `Described` for values of classes that only their owner can import.

    Raises:
        ValueError: A mapping begins with `$` and is not of this notation.
    """
    if isinstance(written, list):
        return [decode(item) for item in written]
    if not isinstance(written, dict):
        return written
    tag = next(iter(written), "")
    if not tag.startswith("$"):
        return {sys.intern(key): decode(item) for key, item in written.items()}
    if tag == "$enum":
        return Described(written[tag], "enum", (written["name"], decode(written["value"])))
    if tag == "$dataclass":
        return Described(written[tag], "dataclass", {key: decode(item) for key, item in written["fields"].items()})
    if tag == "$repr":
        return Described(written["type"], "repr", written[tag])
    if tag not in _READERS:
        raise ValueError(f"Unknown notation {tag!r} in a spool file; this version knows {sorted(_READERS)}.")
    return _READERS[tag](written[tag])
