"""Where in a stream that `torch.save` wrote the values of its one tensor lie, so that they need not be in memory."""

from __future__ import annotations

import functools
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import IO, Any

import torch
from torch import Tensor

from accel_parallel.checkpoint.closed_pickle import Opaque, load_closed


def locate_values(file: IO[bytes], like: Tensor) -> int | None:
    """Return at which byte of a stream the values of a tensor begin that is contiguous and as `like`.

    `None` for everything else: `pickles.load_object` reads it, or says what is wrong with it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            described = load_closed(archive.read(members["data.pkl"]), _known(), ())
            native = archive.read(members["byteorder"]) == sys.byteorder.encode()
        (_, kind, key, *_), offset, size, stride, *rest = described.arguments
        member = members[f"data/{key}"]
        laid_out = (kind.dtype, size, stride, offset, member.file_size)
        if laid_out != (like.dtype, like.shape, like.stride(), 0, like.nbytes) or any(rest) or not native:
            return None
        file.seek(member.header_offset)
        # A member's content begins after a header of its own, with its own padding.
        name, extra = struct.unpack("<26xHH", file.read(30))
        return int(member.header_offset + 30 + name + extra)
    except Exception:  # a damaged stream can raise anything, and the reader of objects names what is wrong
        return None


_STORAGES = [f"{kind}Storage" for kind in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long", "Short")]


@functools.cache
def _known() -> dict[str, Any]:
    storages = {
        f"torch.{name}": torch.serialization.StorageType(name)  # type: ignore[no-untyped-call]
        for name in _STORAGES
    }
    return storages | {"torch._utils._rebuild_tensor_v2": Opaque, "collections.OrderedDict": OrderedDict}
