"""The memory of a GPU, by its name."""

import re
from difflib import get_close_matches

from accel_core.errors import ConfigurationError

_KNOWN = {
    "T4": 16, "L4": 24, "A10": 24, "A10G": 24, "L40": 48, "L40S": 48, "RTX3090": 24, "RTX4090": 24, "RTX5090": 32,
    "H100": 80, "H200": 141, "B200": 180, "MI250": 64, "MI300X": 192, "A30": 24, "A40": 48, "A6000": 48, "H20": 96,
    "A100": 0, "V100": 0, "GH200": 0, "GB200": 0, "RTX3080": 0,
}  # fmt: skip
"""Memory of GPUs in GB, as their makers state it; 0 where they are made in several sizes."""


def memory_of_gpu(name: str) -> int:
    """Return the bytes of a GPU by its name, which may end in its size: `A100-80GB`, `L4`, `24GB`."""
    size = re.search(r"(\d+)\s*Gi?B?$", name, re.IGNORECASE)
    kind = re.sub("[ -]", "", name[: size.start()] if size else name).upper()
    gib = int(size[1]) if size else _KNOWN.get(kind)
    if not gib or kind not in ("", *_KNOWN):
        near = [] if kind in _KNOWN else get_close_matches(kind, _KNOWN, n=3)
        raise ConfigurationError(
            f"The memory of a GPU is known by its name or its size; got {name!r}. "
            + (f"Did you mean {' or '.join(near)}? " if near else "")
            + f"Name the size, as in A100-80GB or 24GB, or one of {', '.join(_KNOWN)}."
        )
    return gib * 2**30
