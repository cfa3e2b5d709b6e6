"""Addresses of object stores, which go through the code as paths do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core.errors import ConfigurationError

# `pathlib` drops the second slash of `s3://`; one letter alone is a drive of Windows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_LOCAL = frozenset({"file", "local"})

if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(Path())


class Address(_Path):
    """A place in a store, such as `s3://bucket/run/7`: joined and named like a path, and never on a disk."""

    @property
    def scheme(self) -> str:
        """What stands before the colon: which library talks to the store."""
        return self.parts[0].removesuffix(":")

    def __str__(self) -> str:
        """Return the address as stores write it."""
        return "//".join((self.parts[0], "/".join(self.parts[1:])))


def address_of(given: str) -> Path | None:
    """Return the address that a text is, and `None` for a text that names something on this machine's disks.

    `file://` names a folder of this machine, which is a path like any other.

    >>> print(address_of("s3://bucket/run/7") / "checkpoints")
    s3://bucket/run/7/checkpoints
    >>> print(address_of("file:///tmp/run"), address_of("run/7"))
    /tmp/run None

    Raises:
        ConfigurationError: It has `..` in it, or several schemes, or no bucket.
    """
    found = _ADDRESS.fullmatch(given)
    if found is None:
        if "://" in given and "::" in given:
            raise ConfigurationError(
                f"An address names one store; got {given!r}, with several schemes. Pass the one in which the "
                "checkpoint lies."
            )
        return None
    scheme, rest = found[1].lower(), found[2]
    parts = rest.rstrip("/").split("/")
    if scheme in _LOCAL:
        return Path("/" + rest)
    if not parts[0] or ".." in parts or "\\" in rest or "\0" in rest:
        raise ConfigurationError(
            f"An address is a scheme, a bucket and names below it, without '..' or backslashes; got {given!r}. Write "
            "it like s3://bucket/run/7."
        )
    return Address(f"{scheme}:", *parts)
