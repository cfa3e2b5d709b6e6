"""Where in a stream that `torch.save` wrote the values of its one tensor lie: they are read into their place."""

from __future__ import annotations

import functools
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import IO, Any

import torch

from accel_parallel.checkpoint.closed_pickle import load_closed, record_of

__all__ = ["locate_tensor"]

_Plain, _Typed = record_of("_rebuild_tensor_v2"), record_of("_rebuild_tensor_v3")


def locate_tensor(file: IO[bytes]) -> tuple[torch.Tensor, int] | None:
    """Return a tensor without its values, and at which byte of the file those begin.

    `None` for everything that is not one contiguous tensor in torch's archive: `pickles.load_object` reads it, or says
    what is wrong with it.
    """
    known = _known()
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            if archive.read(members["byteorder"]) != sys.byteorder.encode():  # values would have to be turned round
                return None
            described = load_closed(archive.read(members["data.pkl"]), known, lambda saved: saved)
        storage, offset, size, stride, grad, hooks, *rest = described.arguments
        dtype = rest.pop(0) if type(described) is _Typed else storage[1].dtype
        member = members[f"data/{storage[2]}"]
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        begins = offset * dtype.itemsize
        plain = tensor.is_contiguous() and not grad and not hooks and not any(rest)
        if not plain or not 0 <= begins <= member.file_size - tensor.nbytes or member.compress_type:
            return None
        file.seek(member.header_offset)
        # A member's content begins behind a header of its own, with its own padding.
        name, extra = struct.unpack("<26xHH", file.read(30))
        return tensor, member.header_offset + 30 + int(name) + int(extra) + begins
    except Exception:  # a damaged stream can raise anything, and the reader of objects names what is wrong
        return None


@functools.cache
def _known() -> dict[str, Any]:
    storages = {
        f"torch.{name}Storage": torch.serialization.StorageType(f"{name}Storage")  # type: ignore[no-untyped-call]
        for name in (
            *("BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat"),
            *("Double", "Float", "Half", "Int", "Long", "Short"),
        )
    }
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    rebuilders = {"torch._utils._rebuild_tensor_v2": _Plain, "torch._utils._rebuild_tensor_v3": _Typed}
    untyped = {"torch.storage.UntypedStorage": record_of("UntypedStorage")}
    return storages | dtypes | rebuilders | untyped | {"collections.OrderedDict": OrderedDict}
