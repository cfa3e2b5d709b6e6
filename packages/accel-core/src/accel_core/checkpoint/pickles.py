"""Plain objects in `torch.save`'s format: written as torch writes them, read without running code.

What a file may name is a closed list, see `rebuild` and `arrays`. Time is not bounded: a small pickle can describe work
without end, such as tuples that hold one another twice. Memory is bounded by the file's size and a constant factor.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import pickletools
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from accel_core._torch import get_restore_location, rebuilders
from accel_core._torch import weights_only_unpickler as unpickler
from accel_core.checkpoint.arrays import finished, numpy_loadable
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, open_member
from accel_core.checkpoint.rebuild import closed_list
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError, UnsafeCheckpointError

__all__ = [
    "TORCH_SAFE_GLOBALS",
    "load_object",
    "locate_tensor",
    "open_plain",
    "prove_readable",
    "read_object",
    "safe_globals",
    "write_object",
]

_LONGEST_BARE_PICKLE = 1 << 20
_CALLING = frozenset({"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
_UNSAFE_WORDS = ("Unsupported global", "Unsupported class", "GLOBAL", "REDUCE", "not allowed", "unsafe", "Can only")


def _multiarray(np: ModuleType) -> Any:
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
"""What every reader allows besides its own list; append a class of yours to allow it too.

NumPy's entries are there for code that looks for them; readers rebuild arrays by means of their own, see `arrays`.
"""


def write_object(path: Path, content: object, *, rank: int = 0) -> Entry:
    """Write tensors, lists, dicts and numbers with `torch.save` and flush the file to disk."""
    with HashingFile(path) as file:
        torch.save(content, file)  # type: ignore[arg-type]
    return Entry(path.name, file.size, file.digest, rank)


def read_object(folder: Path, name: str, *, links: bool = False, **options: object) -> Any:
    """Read what `torch.save` wrote, refusing anything but data.

    Raises:
        UnsafeCheckpointError: Reading it would run code, it is no regular file, or it leads out of the folder.
        CheckpointDamagedError: It is truncated or in another format.
        FileNotFoundError: There is no such file.
    """
    with open(open_member(folder, name, links=links), "rb") as file:
        return load_object(file, folder / name, **options)


def load_object(file: BinaryIO, path: Path, **options: Any) -> object:
    """Read an open file that `torch.save` wrote, refusing anything but data.

    Raises:
        UnsafeCheckpointError: Reading it would run code.
        CheckpointDamagedError: It is truncated or in another format.
    """
    options = {"map_location": "cpu"} | options | {"weights_only": True}
    legacy = not _is_zip(file, path)
    with _only_data(file, path, legacy=legacy), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if legacy:
            return finished(_load_legacy(file, options["map_location"]))
        return finished(torch.load(_mappable(file, path) if options.get("mmap") else file, **options))


def locate_tensor(file: BinaryIO, path: Path) -> tuple[torch.Tensor, int] | None:
    """Return a tensor that `torch.save` wrote, without its values, and at which byte of the file those begin.

    Raises:
        UnsafeCheckpointError: Reading it would run code.
        CheckpointDamagedError: It is truncated or in another format.
    """
    if not _is_zip(file, path):
        return None
    places: list[tuple[int, int]] = []
    with _only_data(file, path, legacy=False), zipfile.ZipFile(file) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if "byteorder" not in members or archive.read(members["byteorder"]) != sys.byteorder.encode():
            return None

        def empty(saved: tuple[Any, ...]) -> object:
            _, kind, key, _, count, *_ = saved
            member = members[f"data/{key}"]
            if member.file_size != count * kind.dtype.itemsize:
                raise pickle.UnpicklingError("damaged storage: of another length than the file says")
            places.append((_content_of(file, member), member.file_size))
            untyped = torch.UntypedStorage(member.file_size, device="meta")  # type: ignore[no-untyped-call]
            return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=untyped, dtype=kind.dtype, _internal=True
            )

        found = _next_pickle(io.BytesIO(archive.read(members["data.pkl"])), empty)
    if type(found) is not torch.Tensor or len(places) != 1 or found.is_conj() or found.is_neg():
        return None
    if not found.is_contiguous():
        return None
    (begin, size), skipped = places[0], int(found.storage_offset()) * found.itemsize
    if skipped + found.nbytes > size:
        raise _damaged(path, "a tensor that is longer than its storage")
    return found, begin + skipped


def _content_of(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return where the content of an archive's member begins: behind a header of its own, with its own padding."""
    file.seek(member.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return member.header_offset + 30 + int(name) + int(extra)


@contextmanager
def _only_data(file: BinaryIO, path: Path, *, legacy: bool) -> Iterator[None]:
    """Read in the block what is on the closed list, and name what goes wrong there."""
    try:
        with safe_globals():
            yield
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in _UNSAFE_WORDS) or (legacy and _calls_something(file)):
            raise _unsafe(path, error) from error
        raise _damaged(path, _first_line(error)) from error
    except Exception as error:
        # A damaged pickle can raise anything: the reader meets opcodes and operands that nobody wrote.
        raise _damaged(path, f"{type(error).__name__}: {_first_line(error)}") from error


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file that the user named.

    Raises:
        CheckpointNotFoundError: There is no such file.
        UnsafeCheckpointError: It is no regular file.
    """
    path = Path(path)
    try:
        return open(open_member(path.parent, path.name, links=True), "rb")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"There is no file {str(path)!r}; got nothing to read. Pass the path of a saved object."
        ) from error


def prove_readable(content: object, component: str) -> None:
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
    except (pickle.UnpicklingError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UnsafeCheckpointError(
            f"The state of {component} could not be read back without running code; got "
            f"{_first_line(error)} Return tensors, numbers, strings, lists and dicts from state_dict(), or declare "
            "the class with torch.serialization.add_safe_globals."
        ) from error


@contextmanager
def safe_globals() -> Iterator[None]:
    """Let `torch.load(weights_only=True)` rebuild the classes on the closed list and those in TORCH_SAFE_GLOBALS.

    The caller passes what it reads through `arrays.finished`.
    """
    with closed_list(TORCH_SAFE_GLOBALS):
        yield


def _load_legacy(file: BinaryIO, map_location: object) -> object:
    """Read the format that torch wrote before 1.6: pickles, then the bytes of their storages.

    torch's own reader makes each storage before it knows whether the file fills it. Here the pickle is read twice: once
    to learn which storages it wants, and again when they hold the file's bytes.
    """
    if _next_pickle(file) != torch.serialization.MAGIC_NUMBER:
        raise pickle.UnpicklingError("a file of another format")
    if _next_pickle(file) != torch.serialization.PROTOCOL_VERSION or not isinstance(_next_pickle(file), dict):
        raise pickle.UnpicklingError("damaged header")
    start, size = file.tell(), os.fstat(file.fileno()).st_size if _has_descriptor(file) else file.seek(0, os.SEEK_END)
    file.seek(start)
    storages = _Storages(size)
    _next_pickle(file, storages.want)
    end = file.tell()
    storages.fill(file, _next_pickle(file))
    restore = get_restore_location(map_location)  # type: ignore[no-untyped-call]
    file.seek(start)
    content = _next_pickle(file, lambda saved: storages.give(saved, restore))
    if file.tell() != end:
        raise pickle.UnpicklingError("a file that changed while it was read")
    rebuilders._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
    return content


def _mappable(file: BinaryIO, path: Path) -> str:
    """Return a path by which torch maps the file that is open, whatever lies at its own path by now."""
    opened = f"/proc/self/fd/{file.fileno()}"
    return opened if os.path.exists(opened) else str(path)


def _has_descriptor(file: BinaryIO) -> bool:
    try:
        file.fileno()
    except (OSError, AttributeError):
        return False
    return True


def _next_pickle(file: BinaryIO, storage: Callable[[tuple[Any, ...]], object] | None = None) -> Any:
    reader = unpickler.Unpickler(file, encoding="utf-8")
    if storage is not None:
        reader.persistent_load = storage  # type: ignore[method-assign]
    return reader.load()  # type: ignore[no-untyped-call]


class _Storages:
    """The storages of a file in the old format, in memory that is the file's content or zero."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._found: dict[Any, tuple[torch.dtype, bytearray]] = {}
        self._given: dict[Any, Any] = {}

    def want(self, saved: tuple[Any, ...]) -> object:
        """Note a storage that the pickle names, and give one of zeros for the time being."""
        kind, storage_type, key, _, count, _ = saved
        if kind != "storage" or not isinstance(storage_type, torch.serialization.StorageType):
            raise pickle.UnpicklingError("damaged storage: of a kind that torch does not write")
        dtype: torch.dtype = storage_type.dtype
        if key not in self._found:
            if type(count) is not int or not 0 <= count * dtype.itemsize <= self._left:
                raise pickle.UnpicklingError("damaged storage: larger than the file")
            self._left -= count * dtype.itemsize
            self._found[key] = dtype, bytearray(count * dtype.itemsize)
        return self.give(saved, lambda storage, _: storage)

    def fill(self, file: BinaryIO, keys: object) -> None:
        """Read the storages' bytes, which follow in the order of `keys`."""
        if not isinstance(keys, list) or len(keys) != len(self._found) or set(keys) != self._found.keys():
            raise pickle.UnpicklingError("damaged storages: a list that is not that of the tensors")
        self._given.clear()
        for key in keys:
            dtype, memory = self._found[key]
            count = int.from_bytes(file.read(8), "little", signed=True)
            if count * dtype.itemsize != len(memory) or file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
                raise pickle.UnpicklingError("damaged storages: the file ends before them")

    def give(self, saved: tuple[Any, ...], restore: Callable[[torch.UntypedStorage, str], Any]) -> object:
        """Return a storage, or the part of it that the pickle names."""
        _, storage_type, key, location, _, view = saved
        dtype, memory = self._found[key]
        if storage_type.dtype != dtype:
            raise pickle.UnpicklingError("damaged storage: of two dtypes")
        if key not in self._given:
            self._given[key] = restore(_untyped(memory), str(location))
        untyped = self._given[key]
        if view is not None:
            _, offset, count = view
            if type(offset) is not int or type(count) is not int or offset < 0 or count < 0:
                raise pickle.UnpicklingError("damaged storage: a part that is not one")
            untyped = untyped[offset * dtype.itemsize : (offset + count) * dtype.itemsize]
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=untyped, dtype=dtype, _internal=True
        )


def _untyped(memory: bytearray) -> torch.UntypedStorage:
    """Return a storage of fixed length over memory; torch lengthens those that it made itself."""
    if not memory:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _is_zip(file: BinaryIO, path: Path) -> bool:
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


def _calls_something(file: BinaryIO) -> bool:
    """Return whether a bare pickle names anything to be imported or called; parsing runs nothing."""
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
        if "Unsupported" in line or "damaged" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ")
    return text.splitlines()[0].strip() if text else type(error).__name__


def _unsafe(path: Path, error: BaseException) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"Reading {str(path)!r} would run code from the file; got {_first_line(error)} Do not use this file. "
        "If it holds objects of a class of yours, declare it with torch.serialization.add_safe_globals."
    )


def _damaged(path: Path, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"The checkpoint file {str(path)!r} is damaged or in another format; got {found}. Load another checkpoint."
    )
