"""How models compute in 8-bit floating point."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from accel_core._records import record
from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import availability
from accel_core.options.engines import engines
from accel_core.options.fp8 import FP8_ALGORITHMS, FP8_FORMATS, MSAMP_LEVELS, Fp8Options
from accel_core.options.option import option_named
from accel_core.plugins.handlers import KwargsHandler

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_OVERRIDES = ("override_fprop", "override_dgrad", "override_wgrad")


def _default(field: str) -> object:
    return option_named(Fp8Options, field).default


def _read(field: str) -> Any:
    return option_named(Fp8Options, field).read()


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} of an 8-bit recipe is not known; got {value!r}. Use one of {list(allowed)}.")


@record
class AORecipeKwargs(KwargsHandler):
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

        if self.pad_inner_dim is None:
            self.pad_inner_dim = _read("pad_inner_dim")
        if self.enable_fsdp_float8_all_gather is None:
            self.enable_fsdp_float8_all_gather = _read("enable_fsdp_float8_all_gather")
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )

    def _unset(self) -> dict[str, Any]:
        return dict.fromkeys(self.__dataclass_fields__)


@record
class TERecipeKwargs(KwargsHandler):
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
        if not availability.is_transformer_engine_available():
            raise MissingDependencyError(
                "Transformer Engine computes in 8 bits for TERecipeKwargs; it is not installed. "
                "Run `pip install transformer-engine[pytorch]`, or use AORecipeKwargs."
            )
        for field in _TE_FIELDS:
            if getattr(self, field) is None:
                setattr(self, field, _read(field))
        if self.override_linear_precision is None:
            forward, inputs, weights = (_read(field) for field in _OVERRIDES)
            self.override_linear_precision = (forward, inputs, weights)
        self.fp8_format = str(self.fp8_format).upper()  # type: ignore[assignment]
        _check("fp8_format", self.fp8_format, FP8_FORMATS)
        _check("amax_compute_algo", self.amax_compute_algo, FP8_ALGORITHMS)

    def _unset(self) -> dict[str, Any]:
        return {field: _default(field) for field in _TE_FIELDS} | {"override_linear_precision": (False, False, False)}


_TE_FIELDS = tuple(each.name for each in fields(TERecipeKwargs) if each.name != "override_linear_precision")


@record
class MSAMPRecipeKwargs(KwargsHandler):
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
        if self.opt_level is None:
            self.opt_level = _read("opt_level")
        _check("opt_level", self.opt_level, MSAMP_LEVELS)

    def _unset(self) -> dict[str, Any]:
        return {"opt_level": _default("opt_level")}


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
        backend = self.backend or _read("backend")
        if backend is None:
            backend = "MSAMP" if availability.is_msamp_available() else "TE"
        backend = str(backend).upper()
        _check("backend", backend, ("TE", "MSAMP"))
        self.backend = backend  # type: ignore[assignment]
        if backend == "TE":
            TERecipeKwargs.__post_init__(self)
        else:
            MSAMPRecipeKwargs.__post_init__(self)

    def _unset(self) -> dict[str, Any]:
        recipe: type[TERecipeKwargs] | type[MSAMPRecipeKwargs]
        recipe = TERecipeKwargs if self.backend == "TE" else MSAMPRecipeKwargs
        fields = dict.fromkeys(self.__dataclass_fields__)
        return {**fields, **recipe._unset(self), "backend": self.backend}
