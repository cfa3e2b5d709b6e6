"""Number formats: choosing one, and its pieces."""

import copy

import pytest
import torch

from accel_core.errors import ConfigurationError, DeviceUnavailableError, MissingDependencyError
from accel_core.host.environ import patch_environment
from accel_core.options.enums import DistributedType, FP8BackendType
from accel_core.plugins.fp8 import AORecipeKwargs, MSAMPRecipeKwargs
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.precision import registry
from accel_core.precision.autocast import AutocastPrecision, convert_to_fp32
from accel_core.precision.fp8 import backend
from accel_core.precision.fp8.torchao import (
    TorchaoPrecision,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_core.precision.precision import Precision
from accel_core.precision.scaler import get_grad_scaler
from accel_core.process.world import World
from accel_testing import requires

pytestmark = pytest.mark.usefixtures("fresh_state")
CPU = torch.device("cpu")


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    )


def _chosen(name: str, *recipes: AORecipeKwargs) -> Precision:
    here = World(0, 1, 0, 1, CPU, None, DistributedType.NO)
    return registry.choose(name, here, AutocastKwargs(), GradScalerKwargs(), list(recipes))


def test_fp16_where_the_device_has_none_is_refused() -> None:
    """Hardware that does not train in fp16, as TPUs, is named, and so is what to use."""
    here = World(0, 1, 0, 1, torch.device("xla:0"), None, DistributedType.XLA)
    with pytest.raises(DeviceUnavailableError, match=r"xla:0 does .*; got mixed_precision='fp16'\. Use .*'bf16'"):
        registry.choose("fp16", here, AutocastKwargs(), GradScalerKwargs())


def test_wrapped_model_is_copied_and_computes_alike() -> None:
    """A copy of a wrapped model runs its own weights, not those of the original."""
    precision = AutocastPrecision("bf16", CPU, AutocastKwargs(), GradScalerKwargs())
    model = precision.wrap(_model())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    x = torch.randn(2, 16)
    assert not torch.equal(model(x), other(x))
    assert model(x).dtype is torch.float32


def test_outputs_of_any_nest_come_back_in_fp32() -> None:
    """Halves are converted, everything else is the same object."""
    kept = torch.ones(1, dtype=torch.int64)
    nest = convert_to_fp32({"a": [torch.ones(1, dtype=torch.bfloat16), kept], "b": (torch.ones(1).half(), "text")})
    assert nest["a"][0].dtype is torch.float32
    assert nest["b"][0].dtype is torch.float32
    assert nest["a"][1] is kept
    assert nest["b"][1] == "text"


def test_scaler_is_that_of_the_device() -> None:
    """Without a label it is this process's device."""
    assert get_grad_scaler(init_scale=8.0).get_scale() == 8.0
    assert get_grad_scaler(DistributedType.MULTI_CPU)._device == "cpu"


@requires("torchao")
def test_torchao_converts_inner_layers_and_trains() -> None:
    """All linear layers but the first and last multiply in 8 bits, near the result in fp32, with real gradients."""
    model = _model()
    x = torch.randn(32, 16)
    expected = model(x)
    assert find_first_last_linear_layers(model) == ("0", "4")
    precision = _chosen("fp8", AORecipeKwargs())
    assert isinstance(precision, TorchaoPrecision)
    assert precision.fp8_backend is FP8BackendType.AO
    wrapped = precision.wrap(precision.convert(model))
    assert [type(layer).__name__ for layer in wrapped] == ["Linear", "ReLU", "Float8Linear", "ReLU", "Linear"]
    assert has_ao_layers(wrapped)
    assert precision.convert(wrapped) is wrapped
    result = wrapped(x)
    assert 0 < float(((result - expected).norm() / expected.norm()).detach()) < 0.1
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())


@requires("torchao")
def test_recipe_wins_over_the_environment() -> None:
    """The recipe given decides, and two recipes contradict each other."""
    with patch_environment(ACCELERATE_FP8_BACKEND="te"):
        assert backend.choose_backend([AORecipeKwargs()]) is FP8BackendType.AO
        assert backend.choose_backend([MSAMPRecipeKwargs()]) is FP8BackendType.MSAMP
    with pytest.raises(ConfigurationError, match=r"AORecipeKwargs.*MSAMPRecipeKwargs"):
        backend.choose_backend([AORecipeKwargs(), MSAMPRecipeKwargs()])


@pytest.mark.parametrize("name", ["te", "msamp"])
def test_library_that_is_missing_is_named(name: str) -> None:
    """A library that needs an NVIDIA GPU and is not here is an error that names it and the way out."""
    if backend.is_msamp_available() or backend.is_transformer_engine_available():
        pytest.skip("needs a machine without Transformer Engine and MS-AMP")
    with patch_environment(ACCELERATE_FP8_BACKEND=name), pytest.raises(MissingDependencyError, match="install"):
        backend.choose(CPU, [], AutocastKwargs())
