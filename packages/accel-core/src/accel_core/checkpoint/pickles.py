"""Plain objects in `torch.save`'s format: written as torch writes them, read by `torch.load(weights_only=True)`.

A crafted file is as safe as torch makes it. On top of that, NumPy's arrays are made by `arrays`, and what was read may
not take more memory than the file fills.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import pickletools
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accel_core.checkpoint.arrays import Array, stand_ins
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, damaged_file, open_member, path_of
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError, UnsafeCheckpointError

_UNSAFE_WORDS = ("Unsupported global", "Unsupported class", "GLOBAL", "REDUCE", "not allowed", "unsafe", "Can only")
_FRAME = f"Unsupported operand {ord(pickle.FRAME)}"  # begins every pickle since protocol 4
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_lock = threading.RLock()


def _numpys_random_state() -> list[Any]:
    """Return the types and functions that a state of NumPy's generator is rebuilt from."""
    if find_spec("numpy") is None:
        return []
    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]  # whose module NumPy 2 renamed
    return [rebuild, np.ndarray, codecs.encode, np.dtype, np.dtypes.UInt32DType]


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
    """Read what `torch.save` wrote, refusing anything but data as unsafe, and what is cut off as damaged."""
    with open(open_member(folder, name, links=links), "rb") as file:
        return load_object(file, folder / name, **options)


def load_object(file: BinaryIO, path: Path, **options: Any) -> object:
    """Read an open file that `torch.save` wrote, refusing anything but data."""
    # The last one wins: no caller switches `weights_only` off.
    options = {"map_location": "cpu"} | options | {"weights_only": True}
    size = file.seek(0, os.SEEK_END)
    room, archive = _room(file, path, size)
    mapped = bool(options.pop("mmap", False)) and archive  # torch maps archives alone
    try:
        with safe_globals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = torch.load(path_of(file.fileno(), path) if mapped else file, mmap=mapped, **options)
        return _Walk(room, size).finished(found)
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in _UNSAFE_WORDS):
            raise _unsafe(path, error) from error
        if _FRAME in str(error):
            raise CheckpointDamagedError(
                f"The checkpoint file {os.fspath(path)!r} is a pickle of protocol 4 or later, which torch reads only "
                f"by running code from it; got {_first_line(error)}. If you know who wrote it, read it with "
                "`torch.load(path, weights_only=False)` and write it with `torch.save(state, path)`, whose own "
                "protocol is 2."
            ) from error
        raise damaged_file(path, _first_line(error)) from error
    except Exception as error:
        # A damaged pickle can raise anything: the reader meets opcodes and operands that nobody wrote.
        raise damaged_file(path, f"{type(error).__name__}: {_first_line(error)}") from error


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file that the user named."""
    path = Path(path)
    try:
        return open(open_member(path.parent, path.name, links=True), "rb")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"The file {str(path)!r} does not exist; got nothing to read. Pass the path of a saved object."
        ) from error


def prove_readable(content: object, component: str) -> None:
    """Make sure that what is about to be saved can be read without running code."""
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
    """Let `torch.load(weights_only=True)` read what the user declared, and NumPy's arrays by way of `arrays`.

    NumPy's own functions and types are not on the list meanwhile, whoever declared them. Threads read one after the
    other: torch keeps its list for the whole process.
    """
    # Sparse tensors are checked too: the indices in a crafted one may lie outside of it.
    with _lock, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        allowed = [one for one in [*before, *TORCH_SAFE_GLOBALS] if not _is_numpys(one)]
        torch.serialization.add_safe_globals([*allowed, *stand_ins()])
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _is_numpys(entry: object) -> bool:
    """Return whether an entry of torch's list is NumPy's, under its own name or another."""
    what, name = entry if isinstance(entry, tuple) else (entry, "")
    modules = (str(name), str(getattr(what, "__module__", "") or ""))
    return any(module.split(".")[0] == "numpy" for module in modules)


class _Walk:
    """Goes through what was read: puts arrays into their places, and refuses what torch made of no bytes of the file.

    torch's list has constructors of memory that nobody wrote (`torch.Tensor(n)`, `bytearray(n)`), and takes hooks and
    attributes that hide a tensor's own.
    """

    def __init__(self, room: int, size: int) -> None:
        self._left, self._size = room, size
        # Every value that was met is kept, so that no id is used again.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._counted = set[tuple[str, int]]()

    def finished(self, value: Any) -> Any:
        """Return a value with arrays in their places; lists, dicts and attributes are changed in place."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        made = value
        if type(value) is Array:
            made = value.content
            if made is None:
                raise pickle.UnpicklingError("damaged array: without its bytes")
        elif isinstance(value, torch.Tensor):
            self._check_tensor(value)
        elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            self._count((str(value.device), value.data_ptr()), value.nbytes())
        elif isinstance(value, bytearray) and len(value) > self._size:
            raise pickle.UnpicklingError("damaged bytes: more than the file has")
        elif type(value) is tuple:
            items = tuple(map(self.finished, value))
            made = value if all(new is old for new, old in zip(items, value, strict=True)) else items
        self._done[id(value)] = (value, made)
        if isinstance(value, list):
            value[:] = map(self.finished, value)
        elif isinstance(value, dict):
            for key, item in list(dict.items(value)):  # not by a method of a subclass
                value[key] = self.finished(item)
        if type(value) is not Array:
            self._check_attributes(value)
        return made

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if tensor._backward_hooks:
            raise pickle.UnpicklingError("Unsupported class: a tensor with hooks")
        if tensor.layout == torch.strided and tensor.device.type != "meta" and type(tensor) in _PLAIN:
            storage = tensor.untyped_storage()
            self._count((str(storage.device), storage.data_ptr()), storage.nbytes())

    def _count(self, key: tuple[str, int], size: int) -> None:
        if key not in self._counted:
            self._counted.add(key)
            self._left -= size
        if self._left < 0:
            raise pickle.UnpicklingError("damaged storage: memory that the file does not fill")

    def _check_attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict:
            return
        if isinstance(value, dict | torch.Tensor) and any(hasattr(type(value), name) for name in attributes):
            raise pickle.UnpicklingError("Unsupported class: attributes that hide those of their type")
        for name, item in list(attributes.items()):
            attributes[name] = self.finished(item)


def _room(file: BinaryIO, path: Path, size: int) -> tuple[int, bool]:
    """Return how many bytes a file has for values, and whether it is an archive; refuse one that grows when read."""
    try:
        if not zipfile.is_zipfile(file):
            return _room_of_pickles(file, size), False
        members = zipfile.ZipFile(file).infolist()
    except Exception as error:
        # zipfile raises whatever it trips over: struct.error, IndexError, UnicodeError, NotImplementedError.
        raise damaged_file(path, f"an archive that cannot be read ({type(error).__name__}: {error})") from error
    finally:
        file.seek(0)
    # `torch.save` stores members as they are; a deflated or doubled one may unpack to a thousand times its size.
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise damaged_file(path, "compressed members, which torch does not write")
    content = sum(member.file_size for member in members)
    if content > size:
        raise damaged_file(path, "members that announce more bytes than the file has")
    return content, True


def _room_of_pickles(file: BinaryIO, size: int) -> int:
    """Return it for a file from before 1.6: three pickles of facts, the objects, the storages' names, their bytes."""
    file.seek(0)
    try:
        for _ in range(5):
            for _ in pickletools.genops(file):
                pass
        return size - file.tell()
    except (ValueError, UnicodeDecodeError, EOFError, OverflowError, MemoryError):
        return size  # a bare pickle, or a damaged one: torch says what is wrong with it


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
