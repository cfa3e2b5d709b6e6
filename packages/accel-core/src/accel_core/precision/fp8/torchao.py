"""fp8 training through torchao: linear layers whose matrix products run in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from accel_core.options.engines import engines
from accel_core.options.enums import FP8BackendType
from accel_core.precision.autocast import Fp8Precision

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_M = TypeVar("_M", bound=torch.nn.Module)
_MULTIPLE = 16
"""Matrix products in 8 bits need dims that are multiples of this."""


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model; `None` if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer is to be converted: a linear one whose sizes allow it and that is not excluded."""
    if not isinstance(module, torch.nn.Linear):
        return False
    fits = module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
    return fits and fqn not in layers_to_filter


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return whether a model has torchao's `Float8Linear` layers."""
    engines()["fp8-ao"].require()
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


def convert_model_to_fp8_ao(
    model: _M,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None,
) -> _M:
    """Exchange linear layers, in place, for ones that multiply in 8 bits (`torchao.float8`).

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    engines()["fp8-ao"].require()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if module_filter_func is None:
        kept = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=kept)
    convert_to_float8_training(model, config=config or Float8LinearConfig(), module_filter_fn=module_filter_func)
    return model


class TorchaoPrecision(Fp8Precision):
    """fp8 matrix products in linear layers, bf16 everywhere else."""

    fp8_backend = FP8BackendType.AO

    def convert(self, model: _M) -> _M:
        """Exchange the linear layers of a model that has none exchanged yet."""
        if has_ao_layers(model):
            return model
        return convert_model_to_fp8_ao(model, self.recipe.config, self.recipe.module_filter_func)
