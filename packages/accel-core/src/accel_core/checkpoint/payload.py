"""The three kinds of files in a checkpoint: tensors, plain objects, JSON. Nothing in them is ever executed."""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import pickle
import pickletools
import warnings
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_core._records import record
from accel_core.checkpoint.arrays import finished, numpy_loadable, only_safe_globals
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, open_member
from accel_core.errors import CheckpointDamagedError, CheckpointError, UnsafeCheckpointError

__all__ = [
    "DTYPES",
    "TORCH_SAFE_GLOBALS",
    "StoredTensor",
    "TensorFile",
    "buffer_of",
    "prove_readable",
    "read_json",
    "read_object",
    "safe_globals",
    "storage_key",
    "stream_tensors",
    "write_json",
    "write_object",
    "write_tensors",
]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names that the safetensors format gives to dtypes."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100 << 20
_LONGEST_BARE_PICKLE = 1 << 20
_CALLING = frozenset({"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
_UNSAFE_WORDS = ("Unsupported global", "Unsupported class", "GLOBAL", "REDUCE", "not allowed", "unsafe")


@record(frozen=True)
class StoredTensor:
    """Where one tensor lies in a file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        start: First byte in the file.
        nbytes: How many bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """The tensors of a safetensors file, each read only when it is asked for.

    Args:
        folder: The checkpoint.
        name: File below it.
        links: Allow links that lead out of the folder.

    Attributes:
        tensors: What the file holds.
        aliases: Names of tensors that share the values of another: name to the name that is stored.

    Raises:
        CheckpointDamagedError: The file is truncated or no safetensors file.
        UnsafeCheckpointError: It is no regular file or leads out of the folder.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, folder: Path, name: str, *, links: bool = False) -> None:
        self.path = folder / name
        self._descriptor = open_member(folder, name, links=links)
        weakref.finalize(self, os.close, self._descriptor)
        self.tensors, self._metadata = self._read_header()
        self.aliases = {
            alias: stored
            for alias, stored in self._metadata.items()
            if alias not in self.tensors and stored in self.tensors
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor in fresh memory on the CPU."""
        stored = self.tensors[self.aliases.get(name, name)]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._read_bytes(stored, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy a tensor of equal shape into `destination`; straight into its memory where that is possible."""
        stored = self.tensors[self.aliases.get(name, name)]
        plain = type(destination) in (Tensor, torch.nn.Parameter) and destination.device.type == "cpu"
        if plain and destination.dtype == stored.dtype and destination.is_contiguous():
            self._read_bytes(stored, destination)
        else:
            destination.copy_(self.read(name))

    def _read_bytes(self, stored: StoredTensor, tensor: Tensor) -> None:
        if not stored.nbytes:
            return
        view, position = buffer_of(tensor), stored.start
        while len(view):
            count = os.preadv(self._descriptor, [view], position)
            if not count:
                raise _damaged(self.path, "that it became shorter while it was read")
            view, position = view[count:], position + count

    def _read_header(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise _damaged(self.path, f"{size} bytes that do not begin like a safetensors file")
        try:
            header = json.loads(os.pread(self._descriptor, length, 8))
            metadata = header.pop("__metadata__", {})
            tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise _damaged(self.path, f"a header that cannot be read ({type(error).__name__}: {error})") from error
        end = 8 + length
        for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.nbytes)):
            if stored.start != end:
                raise _damaged(self.path, "tensors that overlap or leave holes")
            end += stored.nbytes
        if end != size:
            raise _damaged(self.path, f"{size} bytes where the header announces {end}")
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _damaged(self.path, "metadata that is no table of words")
        return tensors, metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, rank: int = 0) -> Entry:
    """Write a safetensors file and flush it to disk.

    Tensors that are the same memory seen the same way are stored once; the other names go into the metadata.

    Args:
        path: File to create; its name is the entry's name.
        tensors: What to write; any strides, any device.
        rank: Who writes.

    Raises:
        CheckpointError: A value is no tensor with data, or its dtype has no name in the format.
    """
    with HashingFile(path) as file:
        stream_tensors(file, tensors)
    return Entry(path.name, file.size, file.digest, rank)


def stream_tensors(file: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write the safetensors form of `tensors` to anything that has `write`.

    Raises:
        CheckpointError: A value is no tensor with data, or its dtype has no name in the format.
    """
    stored, metadata = _distinct(tensors)
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    start = 0
    for name in order:
        tensor = stored[name]
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for name in order:
        tensor = stored[name].detach().to("cpu").contiguous()
        if tensor.numel():
            file.write(buffer_of(tensor))


def write_object(path: Path, content: Any, *, rank: int = 0) -> Entry:
    """Write tensors, lists, dicts and numbers with `torch.save` and flush the file to disk."""
    with HashingFile(path) as file:
        torch.save(content, file)  # type: ignore[arg-type]
    return Entry(path.name, file.size, file.digest, rank)


def write_json(path: Path, content: Any, *, rank: int = 0) -> Entry:
    """Write JSON and flush the file to disk."""
    with HashingFile(path) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
    return Entry(path.name, file.size, file.digest, rank)


def read_object(folder: Path, name: str, *, links: bool = False, **options: Any) -> Any:
    """Read what `torch.save` wrote, refusing anything but data.

    Args:
        folder: The checkpoint.
        name: File below it.
        links: Allow links that lead out of the folder.
        **options: Passed to `torch.load` (`map_location`, `mmap`).

    Raises:
        UnsafeCheckpointError: Reading it would run code, it is no regular file, or it leads out of the folder.
        CheckpointDamagedError: It is truncated or in another format.
        FileNotFoundError: There is no such file.
    """
    path = folder / name
    options = {"map_location": "cpu"} | options | {"weights_only": True}
    with open(open_member(folder, name, links=links), "rb") as file, safe_globals():
        legacy = not _is_zip(file, path)
        source: Any = file
        if options.get("mmap"):
            options["mmap"] = not legacy
            source = path if not legacy else file
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return finished(torch.load(source, **options))
        except pickle.UnpicklingError as error:
            if any(word in str(error) for word in _UNSAFE_WORDS) or (legacy and _calls_something(file)):
                raise _unsafe(path, error) from error
            raise _damaged(path, _first_line(error)) from error
        except Exception as error:
            # A damaged pickle can raise anything: the reader meets opcodes and operands that nobody wrote.
            raise _damaged(path, f"{type(error).__name__}: {_first_line(error)}") from error


def read_json(folder: Path, name: str, *, links: bool = False) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointDamagedError: It is no JSON.
        UnsafeCheckpointError: It is no regular file or leads out of the folder.
        FileNotFoundError: There is no such file.
    """
    with open(open_member(folder, name, links=links), "rb") as file:
        try:
            return json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise _damaged(folder / name, f"no JSON ({error})") from error


def prove_readable(content: Any, component: str) -> None:
    """Make sure that what is about to be saved can be read without running code.

    Raises:
        UnsafeCheckpointError: It holds an object that only code could rebuild.
    """
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    try:
        with safe_globals():
            torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"The state of {component} could not be read back without running code; found "
            f"{_first_line(error)} Return tensors, numbers, strings, lists and dicts from state_dict(), or declare "
            "the class with torch.serialization.add_safe_globals."
        ) from error


@contextmanager
def safe_globals() -> Iterator[None]:
    """Let `torch.load(weights_only=True)` rebuild NumPy's arrays safely, and what TORCH_SAFE_GLOBALS holds.

    What is read so passes through `arrays.finished`.
    """
    with only_safe_globals(TORCH_SAFE_GLOBALS):
        yield


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same memory seen the same way."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them; valid while the tensor lives."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split names into those that are stored and those that are other names for one of them."""
    seen: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"A safetensors file holds tensors with data only; {name!r} is {_describe(tensor)}. "
                "Save with safe_serialization=False, or give the model its weights first."
            )
        first = seen.setdefault(storage_key(tensor), name)
        if first == name:
            stored[name] = tensor
        else:
            aliases[name] = first
    return stored, aliases


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.dtype} tensor on {value.device}"


def _stored(entry: dict[str, Any], offset: int) -> StoredTensor:
    dtype, shape, (start, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("shapes and offsets are numbers")
    count = dtype.itemsize
    for length in shape:
        count *= length
    if end - start != count:
        raise ValueError("offsets do not fit the shape")
    return StoredTensor(dtype, shape, offset + start, count)


def _multiarray(np: Any) -> Any:
    """Return NumPy's module of arrays, which NumPy 2 renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return (getattr(np, "_core", None) or np.core).multiarray


def _numpys_random_state() -> list[Any]:
    """Return the types and functions that a state of NumPy's generator is rebuilt from."""
    if not numpy_loadable():
        return []
    import numpy as np

    return [_multiarray(np)._reconstruct, np.ndarray, codecs.encode, np.dtype, np.dtypes.UInt32DType]


TORCH_SAFE_GLOBALS: list[Any] = _numpys_random_state()
"""What every reader allows beside torch's own types; append a class of yours to allow it too.

NumPy's entries are there for code that looks for them; readers rebuild arrays by means of their own, see `arrays`.
"""


def _is_zip(file: Any, path: Path) -> bool:
    """Return whether the file is an archive as `torch.save` writes it, refusing one that grows when it is read.

    `torch.save` stores members as they are. A deflated or doubled member may unpack to a thousand times its size.
    """
    try:
        if not zipfile.is_zipfile(file):
            return False
        members = zipfile.ZipFile(file).infolist()
    except Exception as error:
        # zipfile raises whatever it trips over: struct.error, IndexError, UnicodeError, NotImplementedError.
        raise _damaged(path, f"an archive that cannot be read ({type(error).__name__}: {error})") from error
    finally:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise _damaged(path, "compressed members, which torch does not write")
    if sum(member.file_size for member in members) > size:
        raise _damaged(path, "members that announce more bytes than the file has")
    return True


def _calls_something(file: Any) -> bool:
    """Tell whether a bare pickle names anything to be imported or called; parsing runs nothing."""
    file.seek(0)
    try:
        for opcode, _, _ in pickletools.genops(file.read(_LONGEST_BARE_PICKLE)):
            if opcode.name in _CALLING:
                return True
    except (ValueError, UnicodeDecodeError, EOFError, OverflowError):
        return False
    return False


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    for line in text.splitlines():
        if "Unsupported" in line:
            return line.strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


def _unsafe(path: Path, error: BaseException) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"Reading {str(path)!r} would run code from the file; found {_first_line(error)} Do not use this file. "
        "If it holds objects of a class of yours, declare it with torch.serialization.add_safe_globals."
    )


def _damaged(path: Path, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"The checkpoint file {str(path)!r} is damaged or in another format; found {found}. Load another checkpoint."
    )
