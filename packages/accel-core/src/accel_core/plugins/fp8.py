"""How models compute in 8-bit floating point."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, cast

from accel_core._records import record
from accel_core.errors import MissingDependencyError, expect_one_of
from accel_core.host import availability
from accel_core.options.engines import engines
from accel_core.options.fp8 import Fp8Options
from accel_core.options.option import fill, option_named, options_of
from accel_core.plugins.handlers import KwargsHandler

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_OVERRIDDEN = "override_linear_precision"
_OVERRIDES = ("override_fprop", "override_dgrad", "override_wgrad")
"""Options that are the three parts of that field."""


def require_transformer_engine() -> None:
    """Refuse to compute by Transformer Engine where it is not installed."""
    if not availability.is_transformer_engine_available():
        raise MissingDependencyError(
            "fp8 through Transformer Engine needs the library transformer_engine, which is not installed. "
            "Run `pip install transformer-engine[pytorch]`, or use torchao by AORecipeKwargs."
        )


class _Recipe(KwargsHandler):
    """Fields that are read from ACCELERATE_FP8_*; those that a library does not use stay `None`."""

    def _unset(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {option.field: option.default for option in options_of(Fp8Options)}
        defaults[_OVERRIDDEN] = (False, False, False)
        return {name: None if value is None else defaults.get(name) for name, value in vars(self).items()}


@record
class AORecipeKwargs(_Recipe):
    """How torchao trains in 8 bits.

    Args:
        config: A `torchao.float8.Float8LinearConfig`; made from the two fields below where `None`.
        module_filter_func: Called with a linear layer and its name; returns whether to convert it. By default,
            all but the first and the last are converted.
        pad_inner_dim: Whether inner dims are padded to a multiple of 16.
        enable_fsdp_float8_all_gather: Whether sharded weights are gathered in 8 bits.

    Raises:
        MissingDependencyError: torchao is not installed.

    Examples:
        >>> recipe = AORecipeKwargs(module_filter_func=lambda layer, name: "head" not in name)
        >>> accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])  # doctest: +SKIP
    """

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        """Make the configuration where none is given."""
        engines()["fp8-ao"].require()
        if self.config is not None:
            return
        from torchao.float8 import Float8LinearConfig

        fill(self, Fp8Options, "pad_inner_dim", "enable_fsdp_float8_all_gather")
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@record
class TERecipeKwargs(_Recipe):
    """How Transformer Engine scales numbers in 8 bits; a field left at `None` is read from ACCELERATE_FP8_*.

    The arguments are those of `transformer_engine.common.recipe.DelayedScaling`.

    Args:
        use_autocast_during_eval: Whether evaluation computes in 8 bits as well.
        margin: Margin of the scaling factor, as a power of two.
        interval: Steps between two computations of the scaling factor.
        fp8_format: "HYBRID", "E4M3" or "E5M2", in any case.
        amax_history_len: Number of steps whose largest values are kept.
        amax_compute_algo: "max" or "most_recent".
        override_linear_precision: Whether forward products, gradients of inputs and gradients of weights use higher
            precision.
        use_mxfp8_block_scaling: Whether every block of 32 values has its own scale.

    Raises:
        MissingDependencyError: Transformer Engine is not installed.
        ConfigurationError: The format or algorithm is unknown.

    Examples:
        >>> recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=32)  # doctest: +SKIP
        >>> accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])  # doctest: +SKIP
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        """Fill what is left open from the environment, then from the defaults."""
        require_transformer_engine()
        if self.override_linear_precision is None:
            forward, inputs, weights = (option_named(Fp8Options, field).read() for field in _OVERRIDES)
            self.override_linear_precision = (forward, inputs, weights)
        if self.fp8_format is not None:
            self.fp8_format = cast(Any, str(self.fp8_format).upper())
        fill(self, Fp8Options, *(each.name for each in fields(TERecipeKwargs) if each.name != _OVERRIDDEN))


@record
class MSAMPRecipeKwargs(_Recipe):
    """What MS-AMP keeps in 8 bits.

    Args:
        opt_level: "O1" for gradients and their exchange, "O2" for optimizer states as well; read from
            ACCELERATE_FP8_OPT_LEVEL where `None`.

    Raises:
        ConfigurationError: The level is neither.

    Examples:
        >>> recipe = MSAMPRecipeKwargs(opt_level="O2")
        >>> accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])  # doctest: +SKIP
    """

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        """Fill the level from the environment."""
        fill(self, Fp8Options, "opt_level")


@record
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipes of Transformer Engine and MS-AMP in one class; use `TERecipeKwargs` or `MSAMPRecipeKwargs` instead.

    Args:
        backend: "TE" or "MSAMP", in any case; read from ACCELERATE_FP8_BACKEND where `None`, then the one installed.

    Raises:
        ConfigurationError: The backend is neither.

    Examples:
        >>> recipe = FP8RecipeKwargs(backend="MSAMP", opt_level="O2")
        >>> accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])  # doctest: +SKIP
    """

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        """Choose the backend and fill the fields of its recipe."""
        warnings.warn(
            "FP8RecipeKwargs holds two recipes in one class. Use TERecipeKwargs or MSAMPRecipeKwargs.",
            FutureWarning,
            stacklevel=3,
        )
        recipes: dict[str, type[TERecipeKwargs | MSAMPRecipeKwargs]]
        recipes = {"TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}
        installed = "MSAMP" if availability.is_msamp_available() else "TE"
        backend = str(self.backend or option_named(Fp8Options, "backend").read() or installed).upper()
        expect_one_of(recipes, "backend", backend)
        self.backend = cast(Any, backend)
        recipes[backend].__post_init__(self)

    def _unset(self) -> dict[str, Any]:
        return {**super()._unset(), "backend": self.backend}
