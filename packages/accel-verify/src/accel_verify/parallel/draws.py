"""Which random numbers a script draws with torch, and on which line: those that only ranks draw make losses differ."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from accel_core.checkpoint.tensor_file import buffer_of
from accel_core.mesh.tensor import local_part
from accel_verify.patch import replace

__all__ = ["DrawWatch"]

_FUNCTIONS = (
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm",
)  # fmt: skip
_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
    "random_", "uniform_",
)  # fmt: skip
_ORDERS = ("torch.utils.data.", "accel_core.", "accel_verify.")
"""Modules whose draws decide which samples are read; instead of the draws, the rows of a sample are compared."""


class DrawWatch:
    """Notes what torch's functions draw while a model trains."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.drawn: dict[str, list[str]] = {}  # by line of code, a digest of each tensor that it drew
        self._wanted = wanted

    def install(self) -> None:
        """Replace torch's functions that draw by watched ones."""
        for owner, names in ((torch, _FUNCTIONS), (Tensor, _METHODS)):
            for name in names:
                replace(owner, name, self._watched(getattr(owner, name)))

    def next_step(self) -> None:
        """Begin the record of the next step."""
        self.drawn = {}

    def _watched(self, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def drawing(*args: object, **kwargs: object) -> object:
            found = original(*args, **kwargs)
            # Reading a value would break the graph that is being traced, and meta tensors have none.
            if not torch.compiler.is_compiling() and isinstance(found, Tensor) and not found.is_meta and self._wanted():
                self._note(found, sys._getframe(1))
            return found

        return drawing

    def _note(self, found: Tensor, frame: FrameType) -> None:
        line = _line(frame)
        if line is not None:
            values = buffer_of(local_part(found.detach()).cpu().contiguous())
            self.drawn.setdefault(line, []).append(hashlib.blake2b(values, digest_size=8).hexdigest())


def _line(frame: FrameType | None) -> str | None:
    """Return the line outside torch that draws, as FILE:LINE; `None` if the draw decides which samples are read."""
    if frame is None or frame.f_globals.get("__name__", "").startswith(_ORDERS):
        return None
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):  # up to the caller of a layer
        frame = frame.f_back
    if frame is None:
        return None
    file, here = Path(frame.f_code.co_filename), Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{frame.f_lineno}"
