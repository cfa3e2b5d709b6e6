"""bitsandbytes, imported when something is packed: importing it takes seconds, and most runs pack nothing."""

from __future__ import annotations

import importlib
from typing import Any

from accel_core.errors import MissingDependencyError
from accel_core.host.availability import imported


def bitsandbytes() -> Any:
    """Return the library, importing it at the first call."""
    try:
        return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise MissingDependencyError(
            "bitsandbytes packs the weights of quantized models; it is not installed. Install it with "
            "`pip install 'bitsandbytes>=0.47'`, or accel-quant with its extra `bitsandbytes`."
        ) from None


def is_instance(value: object, *names: str) -> bool:
    """Return whether a value is of a class of `bitsandbytes.nn`; false if the library was never imported."""
    return any(isinstance(value, imported(f"bitsandbytes.nn:{name}") or ()) for name in names)
