"""Pickles written by hand, as an attacker writes them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any


class Named:
    """Pickles as a call of something by name."""

    call = b"R"

    def __init__(self, module: str, name: str, *arguments: Any, state: Any = None) -> None:
        self.module, self.name, self.arguments, self.state = module, name, arguments, state


class New(Named):
    """Pickles as an instance that `__new__` makes."""

    call = b"\x81"


class Word:
    """Pickles as a name alone."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Storage:
    """Pickles as a storage of torch."""

    def __init__(self, kind: str, key: str, count: int) -> None:
        self.kind, self.key, self.count = kind, key, count


def encode(value: Any) -> bytes:
    """Return the pickle of a value, without its end."""
    if isinstance(value, (Word, Named)):
        code = b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
        if isinstance(value, Named):
            code += encode(value.arguments) + value.call
            code += b"" if value.state is None else encode(value.state) + b"b"
        return code
    if isinstance(value, Storage):
        return b"(" + encode("storage") + encode(Word("torch", value.kind)) + encode(value.key) + encode("cpu") + (
            encode(value.count) + b"tQ"
        )  # fmt: skip
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return encode(Named("_codecs", "encode", value.decode("latin1"), "latin1"))
    if isinstance(value, tuple):
        return b"(" + b"".join(encode(item) for item in value) + b"t"
    assert isinstance(value, dict)
    return b"}(" + b"".join(encode(key) + encode(item) for key, item in value.items()) + b"u"


def program_of(value: Any) -> bytes:
    """Return the whole pickle of a value."""
    return b"\x80\x02" + encode(value) + b"."


def write(path: Path, program: bytes, **storages: bytes) -> None:
    """Put a crafted pickle into a file such as `torch.save` makes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
