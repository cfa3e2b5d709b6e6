"""Which library computes fp8: the recipe given, then ACCELERATE_FP8_BACKEND, then what is installed."""

from __future__ import annotations

from typing import Any

import torch

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import environ
from accel_core.host.availability import is_msamp_available, is_torchao_available, is_transformer_engine_available
from accel_core.options.enums import FP8BackendType
from accel_core.plugins.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_core.plugins.handlers import AutocastKwargs, KwargsHandler
from accel_core.precision.fp8.msamp import MsampPrecision
from accel_core.precision.fp8.torchao import TorchaoPrecision
from accel_core.precision.fp8.transformer_engine import TransformerEnginePrecision
from accel_core.precision.precision import Precision


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
        recipe = recipes[0]
        named = getattr(recipe, "backend", None)
        if named is not None:
            return FP8BackendType(str(named).upper())
        if isinstance(recipe, AORecipeKwargs):
            return FP8BackendType.AO
        return FP8BackendType.TE if isinstance(recipe, TERecipeKwargs) else FP8BackendType.MSAMP
    name = environ.choice("ACCELERATE_FP8_BACKEND", ("auto", "te", "msamp", "ao", "no"), "auto")
    if name not in ("auto", "no"):
        return FP8BackendType(name.upper())
    if is_torchao_available():
        return FP8BackendType.AO
    if is_transformer_engine_available():
        return FP8BackendType.TE
    if is_msamp_available():
        return FP8BackendType.MSAMP
    raise MissingDependencyError(
        "Computing in 8 bits needs torchao, transformer_engine or msamp; got mixed_precision='fp8' and none of them is "
        "installed. Run `pip install torchao`."
    )


def choose(device: torch.device, recipes: list[Any], autocast: AutocastKwargs) -> Precision:
    """Return the fp8 number format on `device`."""
    backend = choose_backend(recipes)
    recipe = recipes[0] if recipes else None
    if backend is FP8BackendType.AO:
        return TorchaoPrecision(device, recipe or AORecipeKwargs(), autocast)
    if backend is FP8BackendType.TE:
        return TransformerEnginePrecision(device, recipe or TERecipeKwargs(), autocast)
    return MsampPrecision(device, recipe or MSAMPRecipeKwargs(), autocast)
