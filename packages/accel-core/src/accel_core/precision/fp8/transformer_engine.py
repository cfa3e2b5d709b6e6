"""fp8 training through NVIDIA's Transformer Engine. Never run on hardware: the library needs an NVIDIA GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any, TypeVar

import torch

from accel_core.options.enums import FP8BackendType
from accel_core.plugins.fp8 import TERecipeKwargs, require_transformer_engine
from accel_core.precision.autocast import Fp8Precision

_M = TypeVar("_M", bound=torch.nn.Module)
_MULTIPLE = 16


def _engine() -> ModuleType:
    require_transformer_engine()
    return importlib.import_module("transformer_engine.pytorch")


def has_transformer_engine_layers(model: torch.nn.Module) -> bool:
    """Return whether a model has layers of Transformer Engine."""
    te = _engine()
    kinds = (te.LayerNorm, te.Linear, te.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


@torch.no_grad()
def convert_model(
    model: torch.nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Exchange, in place, linear and layer-norm layers for Transformer Engine's, or back."""
    te = _engine()
    for name, layer in list(model.named_children()):
        library, old = (te, torch.nn) if to_transformer_engine else (torch.nn, te)
        new = None
        if _convert_linear and isinstance(layer, old.Linear):
            new = _linear_like(layer, library)
        elif _convert_ln and isinstance(layer, old.LayerNorm):
            new = _filled(layer, library, "LayerNorm", layer.weight.shape[0], eps=layer.eps)
        if new is None:
            convert_model(layer, to_transformer_engine, _convert_linear, _convert_ln)
        else:
            setattr(model, name, new)


def _linear_like(layer: Any, library: ModuleType) -> torch.nn.Module | None:
    if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
        return None
    has_bias = layer.bias is not None and layer.bias.numel() > 0
    return _filled(layer, library, "Linear", layer.in_features, layer.out_features, bias=has_bias)


def _filled(layer: Any, library: ModuleType, kind: str, *sizes: int, **settings: object) -> torch.nn.Module:
    """Make a layer of another library, with the weights of a layer."""
    settings["dtype" if library is torch.nn else "params_dtype"] = layer.weight.dtype
    new: torch.nn.Module = getattr(library, kind)(*sizes, **settings).to(layer.weight.device)
    for name, parameter in new.named_parameters():
        parameter.copy_(layer.get_parameter(name))
    return new


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: object, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Run a model's forward under `te.fp8_autocast`."""
    te = _engine()

    @functools.wraps(model_forward)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def recipe_arguments(handler: TERecipeKwargs | None) -> dict[str, Any]:
    """Return the arguments of Transformer Engine's recipe that a handler stands for."""
    arguments = (handler.to_kwargs() if handler is not None else {}).copy()
    # Which are not arguments of the recipe.
    for ours in ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend", "opt_level"):
        arguments.pop(ours, None)
    return arguments


def apply_fp8_autowrap(model: _M, fp8_recipe_handler: TERecipeKwargs | None) -> _M:
    """Make `model.forward` compute in 8 bits where its layers can."""
    _engine()
    from transformer_engine.common import recipe as recipes

    arguments = recipe_arguments(fp8_recipe_handler)
    if "fp8_format" in arguments:
        arguments["fp8_format"] = getattr(recipes.Format, arguments["fp8_format"])
    blocks = fp8_recipe_handler is not None and bool(fp8_recipe_handler.use_mxfp8_block_scaling)
    recipe = recipes.MXFP8BlockScaling() if blocks else recipes.DelayedScaling(**arguments)
    evaluating = fp8_recipe_handler is not None and bool(fp8_recipe_handler.use_autocast_during_eval)
    model.forward = MethodType(contextual_fp8_autocast(model.forward, recipe, evaluating), model)
    return model


class TransformerEnginePrecision(Fp8Precision):
    """fp8 through Transformer Engine, bf16 everywhere else. Never run on hardware."""

    fp8_backend = FP8BackendType.TE

    def convert(self, model: _M) -> _M:
        """Exchange the layers of a model that has none exchanged yet."""
        if not has_transformer_engine_layers(model):
            convert_model(model)
        return model

    def wrap(self, model: _M) -> _M:
        """Run forward under bf16 autocast and, inside it, in 8 bits."""
        if "_original_forward" in model.__dict__:
            return model
        return super().wrap(apply_fp8_autowrap(model, self.recipe))
