"""Which random numbers a script draws, on which line, and which of them nothing has seeded."""

from __future__ import annotations

import functools
import importlib
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from accel_core.host.availability import has_module
from accel_verify.digests import digest, random_states
from accel_verify.patch import wrap

_FUNCTIONS = (
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm",
)  # fmt: skip
_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
    "random_", "uniform_",
)  # fmt: skip
_OWN = "default_rng"
_SEEDS = (".seed", ".setstate", ".set_state")
_ORDERS = ("torch.utils.data.", "accel_core.", "accel_verify.")
"""Modules whose draws decide which samples are read; instead of the draws, the rows of a sample are compared."""


class DrawWatch:
    """Notes what is drawn while a model trains, and at any time what is drawn without a seed."""

    def __init__(self, wanted: Callable[[], bool] = lambda: False) -> None:
        self.drawn: dict[str, list[str]] = {}  # by line of code, a digest of each value that it drew
        self._wanted = wanted
        self._seed, self._fresh, self._seeded = torch.initial_seed(), random_states(), set[str]()
        self._unseeded: dict[str, str] = {}  # the first draw of each source that nothing had seeded

    def install(self) -> None:
        """Replace functions that draw, and those that seed, by watched ones."""
        for library, owner, names in _functions():
            for name in names:
                wrap(owner, name, functools.partial(self._called, library, f"{owner.__name__}.{name}"))

    def next_step(self) -> None:
        """Begin the record of the next step."""
        self.drawn = {}

    @property
    def unseeded(self) -> list[str]:
        """What drew without a seed so far: the first loader, the first layer, and the first call of each library."""
        now = random_states()
        for library in ("NumPy", "Python"):  # libraries have calls of their own, which are not watched
            if now[library] != self._fresh[library] and not self._is_seeded(library):
                self._unseeded.setdefault(library, f"a call that uses the generator of {library}")
        return list(self._unseeded.values())

    def _is_seeded(self, library: str) -> bool:
        return torch.initial_seed() != self._seed if library == "torch" else library in self._seeded

    def _called(
        self, library: str, call: str, original: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        found = original(*args, **kwargs)
        # Reading a value would break the graph that is being traced, and meta tensors have none.
        if torch.compiler.is_compiling() or (isinstance(found, Tensor) and found.is_meta):
            return found
        if call.endswith(_SEEDS):
            self._seeded.add(library)
            return found
        frame = sys._getframe(2)
        module = frame.f_globals.get("__name__", "")
        orders = module.startswith(_ORDERS)
        source = "a loader" if orders else "a layer" if module.startswith("torch.nn.") else ""
        seed = next(iter((*args, *kwargs.values())), None) if library == _OWN else kwargs.get("generator")
        if seed is None and not self._is_seeded(library):
            self._unseeded.setdefault(source or library, f"{source or f'`{call}`'} at {_line(frame)}")
        if self._wanted() and not orders:
            self.drawn.setdefault(_line(frame), []).append(digest(found))
        return found


def _functions() -> Iterator[tuple[str, type | ModuleType, Iterable[str]]]:
    """Yield libraries, what has functions of theirs that draw or seed, and the names of these."""
    yield "torch", torch, _FUNCTIONS
    yield "torch", Tensor, _METHODS
    yield "torch", torch.random, ["initial_seed"]
    yield "Python", random, _of_generator(random)
    if has_module("numpy"):
        numpy = importlib.import_module("numpy.random")
        yield "NumPy", numpy, [*_of_generator(numpy), "seed"]
        yield _OWN, numpy, [_OWN]


def _of_generator(module: Any) -> list[str]:
    """Return the functions of a module that are methods of its one generator, without those that read its state."""
    own = module.random.__self__
    return [key for key, each in vars(module).items() if getattr(each, "__self__", 0) is own and key[:3] != "get"]


def _line(frame: FrameType) -> str:
    """Return the line of the script, or of a module of its own, that a call comes from, as FILE:LINE."""
    for at, _ in traceback.walk_stack(frame):  # where all are of libraries, the last one
        package = str(at.f_globals.get("__package__"))
        if not package.startswith(("torch.", "accel_")) and "-packages" not in at.f_code.co_filename:
            break
    file, here = Path(at.f_code.co_filename), Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{at.f_lineno}"


def cured(calls: Sequence[str]) -> str:
    """Say what drew without a seed, and what to do."""
    draw = "draw" if len(calls) > 1 else "draws"
    return (
        f"{' and '.join(calls)} {draw} without a seed, so each process gets other numbers. Call set_seed(0) before it, "
        "and give a seed to generators of your own."
    )
