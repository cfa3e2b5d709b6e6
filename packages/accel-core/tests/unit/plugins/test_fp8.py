"""The 8-bit recipes fill their fields, check them and say what has to be installed."""

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import availability, installed
from accel_core.plugins import fp8


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipe believe that Transformer Engine is installed: only its fields are tested here."""
    monkeypatch.setattr(availability, "is_transformer_engine_available", lambda: True)


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_defaults() -> None:
    """Without arguments and environment the recipe is that of delayed scaling, and nothing differs from it."""
    recipe = fp8.TERecipeKwargs()
    assert (recipe.margin, recipe.interval, recipe.fp8_format) == (0, 1, "HYBRID")
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (1024, "most_recent")
    assert recipe.override_linear_precision == (False, False, False)
    assert recipe.use_mxfp8_block_scaling is recipe.use_autocast_during_eval is False
    assert recipe.to_kwargs() == {}


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable fills its field, which differs from its default then."""
    texts = {"MARGIN": "3", "INTERVAL": "2", "FORMAT": "e4m3", "AMAX_HISTORY_LEN": "5", "AMAX_COMPUTE_ALGO": "max"}
    texts |= {"USE_AUTOCAST_DURING_EVAL": "1", "USE_MXFP8_BLOCK_SCALING": "1", "OVERRIDE_WGRAD": "1"}
    for name, text in texts.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", text)
    assert fp8.TERecipeKwargs().to_kwargs() == {
        "margin": 3,
        "interval": 2,
        "fp8_format": "E4M3",
        "amax_history_len": 5,
        "amax_compute_algo": "max",
        "use_autocast_during_eval": True,
        "use_mxfp8_block_scaling": True,
        "override_linear_precision": (False, False, True),
    }


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"fp8_format": "E9"}, r"'E9'.*HYBRID"), ({"amax_compute_algo": "mean"}, r"'mean'.*most_recent")],
)
def test_unknown_formats_are_refused(arguments: dict[str, str], words: str) -> None:
    """A format or algorithm that does not exist is refused with those that do."""
    with pytest.raises(ConfigurationError, match=words):
        fp8.TERecipeKwargs(**arguments)  # type: ignore[arg-type]


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe without its library says what to install."""
    monkeypatch.setattr(availability, "is_transformer_engine_available", lambda: False)
    monkeypatch.setattr(installed, "version_of", lambda _: None)
    with pytest.raises(MissingDependencyError, match="transformer-engine"):
        fp8.TERecipeKwargs()
    with pytest.raises(MissingDependencyError, match="pip install torchao"):
        fp8.AORecipeKwargs()


def test_msamp_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level is O2 unless environment or argument say O1, and no other exists."""
    assert fp8.MSAMPRecipeKwargs().opt_level == "O2"
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert fp8.MSAMPRecipeKwargs().to_kwargs() == {"opt_level": "O1"}
    with pytest.raises(ConfigurationError, match=r"'O3'.*O1"):
        fp8.MSAMPRecipeKwargs(opt_level="O3")  # type: ignore[arg-type]


@pytest.mark.usefixtures("transformer_engine")
def test_the_double_recipe_still_works() -> None:
    """FP8RecipeKwargs warns and fills the fields of the backend it is for."""
    with pytest.warns(FutureWarning, match="TERecipeKwargs"):
        engine = fp8.FP8RecipeKwargs(backend="te", margin=2)  # type: ignore[arg-type]
    assert (engine.backend, engine.margin, engine.fp8_format, engine.opt_level) == ("TE", 2, "HYBRID", None)
    assert engine.to_kwargs() == {"margin": 2}
    with pytest.warns(FutureWarning):
        msamp = fp8.FP8RecipeKwargs(backend="msamp")  # type: ignore[arg-type]
    assert (msamp.backend, msamp.opt_level) == ("MSAMP", "O2")
    with pytest.warns(FutureWarning), pytest.raises(ConfigurationError, match=r"'ZZ'.*MSAMP"):
        fp8.FP8RecipeKwargs(backend="zz")  # type: ignore[arg-type]


def test_torchao_configuration_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two switches, by argument or environment, reach torchao's own configuration."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    recipe = fp8.AORecipeKwargs()
    assert recipe.config is not None
    assert (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather) == (True, True)
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    recipe = fp8.AORecipeKwargs(enable_fsdp_float8_all_gather=False)
    assert recipe.config is not None
    assert (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather) == (False, False)
