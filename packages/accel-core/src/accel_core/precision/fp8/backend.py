"""Which library computes fp8: the recipe given, then ACCELERATE_FP8_BACKEND, then what is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import environ
from accel_core.host.availability import is_msamp_available, is_torchao_available, is_transformer_engine_available
from accel_core.options.engines import engines
from accel_core.options.enums import FP8BackendType
from accel_core.plugins.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_core.plugins.handlers import AutocastKwargs, KwargsHandler
from accel_core.precision.autocast import Fp8Precision
from accel_core.precision.fp8.msamp import MsampPrecision
from accel_core.precision.fp8.torchao import TorchaoPrecision
from accel_core.precision.fp8.transformer_engine import TransformerEnginePrecision
from accel_core.precision.precision import Precision

_LIBRARIES: dict[FP8BackendType, tuple[type[KwargsHandler], type[Fp8Precision], Callable[[], bool]]] = {
    FP8BackendType.AO: (AORecipeKwargs, TorchaoPrecision, is_torchao_available),
    FP8BackendType.TE: (TERecipeKwargs, TransformerEnginePrecision, is_transformer_engine_available),
    FP8BackendType.MSAMP: (MSAMPRecipeKwargs, MsampPrecision, is_msamp_available),
}
"""For each library its recipe, its precision and whether it is installed, in the order in which they are chosen."""


def choose_backend(recipes: list[KwargsHandler]) -> FP8BackendType:
    """Return the library that computes fp8.

    Raises:
        ConfigurationError: Several recipes, or an unknown name in ACCELERATE_FP8_BACKEND.
        MissingDependencyError: No library is installed.
    """
    if len(recipes) > 1:
        raise ConfigurationError(
            f"One fp8 recipe at most can be used; got {[type(recipe).__name__ for recipe in recipes]}. Keep one."
        )
    if recipes:
        named = getattr(recipes[0], "backend", None)
        if named is not None:
            return FP8BackendType(str(named).upper())
        return next(library for library, row in _LIBRARIES.items() if isinstance(recipes[0], row[0]))
    name = environ.choice("ACCELERATE_FP8_BACKEND", ("auto", "te", "msamp", "ao", "no"), "auto")
    if name not in ("auto", "no"):
        return FP8BackendType(name.upper())
    for library, (_, _, is_available) in _LIBRARIES.items():
        if is_available():
            return library
    raise MissingDependencyError(
        "Computing in 8 bits needs torchao, transformer_engine or msamp; got mixed_precision='fp8' and none of them is "
        "installed. Run `pip install torchao`."
    )


def choose(device: torch.device, recipes: list[Any], autocast: AutocastKwargs) -> Precision:
    """Return the fp8 number format on `device`."""
    backend = choose_backend(recipes)
    recipe, precision, _ = _LIBRARIES[backend]
    if backend is FP8BackendType.MSAMP:  # the other recipes ask for their libraries themselves
        engines()["fp8-msamp"].require()
    return precision(device, recipes[0] if recipes else recipe(), autocast)
