"""The header of a GGUF file: which tensors it holds, of which types, and where they lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package knows types and their sizes. Its
reader trusts counts and lengths, and makes an array of each word of a vocabulary, which takes 19 seconds for one of
128,000. So the header is read here, within bounds, and vocabularies are skipped.
"""

import importlib
import math
import os
import struct
from types import ModuleType
from typing import IO, Any, NamedTuple

import torch

from accel_core.checkpoint.manifest import damaged_file
from accel_core.checkpoint.tensor_file import StoredTensor
from accel_core.errors import CheckpointError, MissingDependencyError

_PLAIN = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
"""Types whose values torch computes with as they lie."""

_LONGEST = 100_000_000  # of a header, as in safetensors files
_LONGEST_WORD = 1 << 16
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4


class GgufForm(NamedTuple):
    """What a tensor is before it is packed: the name of its type in the format, and its shape in torch's order."""

    kind: str
    shape: tuple[int, ...]


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself: the bytes of its tensors in their order, their forms, numbers and words."""

    tensors: dict[str, StoredTensor]
    forms: dict[str, GgufForm]
    metadata: dict[str, object]


def library() -> ModuleType:
    """Return the `gguf` package.

    Raises:
        MissingDependencyError: When it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as failure:
        raise MissingDependencyError(
            f"GGUF files are read with the gguf package, which cannot be imported; got: {failure}. Run `pip "
            "install gguf`."
        ) from failure


class _Reader:
    """The bytes of a header, in order; what goes beyond the file is refused before it is read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = file
        self.left = min(size, _LONGEST)

    def _spend(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"{count} bytes where a header has at most {self.left} left")
        self.left -= count

    def take(self, count: int) -> bytes:
        """Read bytes."""
        self._spend(count)
        raw = self.file.read(count)
        if len(raw) != count:
            raise ValueError("that it became shorter while it was read")
        return raw

    def skip(self, count: int) -> None:
        """Leave bytes out."""
        self._spend(count)
        self.file.seek(count, os.SEEK_CUR)

    def number(self, form: str = "Q") -> int:
        """Read a number; by default one of 8 bytes."""
        found: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return found

    def word(self) -> str:
        """Read a name."""
        length = self.number()
        if length > _LONGEST_WORD:
            raise ValueError(f"a name of {length} bytes")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> object:
        """Read a number or a word; None for a long one and for arrays, which are left out."""
        if kind == _ARRAY:
            self.skip_items(self.number("I"), self.number())
            return None
        if kind != _STRING:
            return self.number(_number(kind))
        length = self.number()
        if length <= _LONGEST_WORD:
            return self.take(length).decode("utf-8")
        self.skip(length)
        return None

    def skip_items(self, kind: int, count: int) -> None:
        """Leave an array out."""
        if kind not in (_STRING, _ARRAY):
            self.skip(count * struct.calcsize(f"<{_number(kind)}"))
            return
        if count > self.left // 8:  # a string has 8 bytes before it, and an array 12
            raise ValueError(f"an array of {count} strings or arrays in at most {self.left} bytes")
        if kind == _ARRAY:
            for _ in range(count):
                self.skip_items(self.number("I"), self.number())
            return
        # As `skip(number())`, without calls of its own: a vocabulary has hundreds of thousands.
        read, seek, left, decode = self.file.read, self.file.seek, self.left, int.from_bytes
        for _ in range(count):
            length = decode(read(8), "little")
            left -= 8 + length
            if left < 0:
                raise ValueError(f"a string of {length} bytes where a header has less left")
            seek(length, os.SEEK_CUR)
        self.left = left


def _number(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}, which the format has not")
    return _NUMBERS[kind]


def read_gguf(descriptor: int, path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check the header of an open GGUF file; it may have at most 100 MB.

    Raises:
        CheckpointDamagedError: When it is truncated, or not in the format.
        CheckpointError: When it holds a type that the `gguf` package does not know.
        MissingDependencyError: When that package is not installed.
    """
    size = os.fstat(descriptor).st_size
    known = library()
    try:
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return _parse(_Reader(file, size), size, known, os.fspath(path))
    except (ValueError, RecursionError) as error:
        reason = "arrays that are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged_file(path, reason) from error


def _parse(reader: _Reader, size: int, known: ModuleType, path: str) -> GgufHeader:
    if reader.left < 24 or reader.take(4) != b"GGUF":
        raise ValueError(f"{size} bytes that do not begin like a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        swapped = ", or a file for machines with the other order of bytes" if version & 0xFFFF == 0 else ""
        raise ValueError(f"version {version} of the format{swapped}, where 2 and 3 can be read")
    count, pairs = reader.number(), reader.number()
    metadata: dict[str, object] = {}
    for _ in range(pairs):
        key = reader.word()
        if not key or key in metadata:
            raise ValueError(f"the key {key!r}, empty or for the second time")
        metadata[key] = reader.value(reader.number("I"))
    forms: dict[str, GgufForm] = {}
    entries: list[tuple[int, int, str, StoredTensor]] = []
    for _ in range(count):
        name = reader.word()
        if not name or name in forms:
            raise ValueError(f"a tensor with the name {name!r}, empty or for the second time")
        forms[name], entry = _tensor(reader, name, known, path)
        entries.append((entry.start, entry.stop, name, entry))
    boundary = metadata.get("general.alignment", 32)
    if type(boundary) is not int or boundary <= 0 or boundary & (boundary - 1):
        raise ValueError(f"an alignment of {boundary!r}, which is not a power of two")
    base = -(-(min(size, _LONGEST) - reader.left) // boundary) * boundary
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for start, stop, name, entry in sorted(entries):
        if start < end or start % boundary:
            raise ValueError(f"tensors that overlap or lie askew: {name!r} at byte {start}")
        if base + stop > size:
            raise ValueError(f"tensor {name!r} up to byte {base + stop} of {size}")
        tensors[name] = entry._replace(start=base + start)
        end = stop
    return GgufHeader(tensors, forms, metadata)


def _tensor(reader: _Reader, name: str, known: ModuleType, path: str) -> tuple[GgufForm, StoredTensor]:
    axes = reader.number("I")
    if axes > _MOST_AXES:
        raise ValueError(f"tensor {name!r} with {axes} axes, where the format has {_MOST_AXES}")
    shape = tuple(reader.number() for _ in range(axes))[::-1]
    number, start = reader.number("I"), reader.number()
    kind: Any = next((each for each in known.GGML_QUANT_SIZES if each == number), None)
    if kind is None:
        raise CheckpointError(
            f"A GGUF file holds a tensor of a type that the installed gguf package does not know; got {number} for "
            f"{name!r} in {path!r}. Install a newer gguf, or convert the file to a type such as Q8_0."
        )
    values, nbytes = known.GGML_QUANT_SIZES[kind]
    row = shape[-1] if shape else 1
    if row % values:
        raise ValueError(f"tensor {name!r} with rows of {row}, where {kind.name} packs {values} together")
    total = math.prod(shape)
    if not total and max(shape) >> 31:
        raise ValueError(f"tensor {name!r} of a shape that torch cannot hold: {list(shape)}")
    if kind.name in _PLAIN:
        stored = StoredTensor(_PLAIN[kind.name], shape, start, total * nbytes)
    else:
        packed = (*shape[:-1], row // values * nbytes)
        stored = StoredTensor(torch.uint8, packed, start, total // values * nbytes)
    return GgufForm(kind.name, shape), stored
