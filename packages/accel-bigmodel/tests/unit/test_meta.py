"""Models without weights."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, init_on_device, set_module_tensor_to_device
from accel_testing import limits


class Tied(nn.Module):
    """Two layers that share a weight, and a parameter registered twice before it was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        shared = nn.Parameter(torch.ones(2), requires_grad=False)
        self.one, self.two = shared, shared
        self.register_buffer("scale", torch.full((1,), 2.0))


def test_parameters_are_empty_and_buffers_are_not() -> None:
    """Parameters have shapes and no values; buffers keep theirs; ties and `requires_grad` survive."""
    with init_empty_weights():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.scale.item() == 2.0
    assert model.second.weight is model.first.weight
    assert model.one is model.two
    assert not model.one.requires_grad


def test_buffers_are_empty_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, or else ACCELERATE_INIT_INCLUDE_BUFFERS, empties buffers too."""
    with init_empty_weights(include_buffers=True):
        assert Tied().scale.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert Tied().scale.is_meta


def test_a_hundred_billion_parameters_take_no_memory() -> None:
    """A thousand layers of a hundred million parameters are built at once."""
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10_000, 10_000, bias=False) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) == 100_000_000_000


def test_other_threads_build_real_models() -> None:
    """While one thread builds empty models, another one's are real, and torch's classes are untouched."""
    register, inside, done = nn.Module.register_parameter, threading.Event(), threading.Event()
    found: list[torch.device] = []

    def build() -> None:
        inside.wait(limits.limit())
        found.append(nn.Linear(2, 2).weight.device)
        done.set()

    thread = threading.Thread(target=build)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert done.wait(limits.limit())
        assert nn.Module.register_parameter is register
        assert nn.Linear(2, 2).weight.is_meta
    thread.join()
    assert found == [torch.device("cpu")]
    assert nn.Linear(2, 2).weight.device == torch.device("cpu")


def test_contexts_nest_and_end_after_an_error() -> None:
    """The innermost context decides, and an exception leaves none behind."""
    with init_empty_weights():
        with init_on_device("cpu"):
            assert not nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


def test_attributes_and_classes_of_parameters_are_kept() -> None:
    """A subclass with attributes of its own stays what it is."""

    class Marked(nn.Parameter):
        pass

    model = nn.Module()
    weight = Marked(torch.ones(2))
    weight.note = "kept"
    with init_empty_weights():
        model.weight = weight
    assert type(model.weight) is Marked
    assert model.weight.is_meta
    assert model.weight.note == "kept"


def build_and_fail(module: nn.Module) -> None:
    """Give a module a weight, then fail."""
    module.weight = nn.Linear(2, 2).weight
    raise KeyError


def test_parameters_are_plain_ones_afterwards() -> None:
    """Initializers do nothing while a model is built; afterwards, and in copies, parameters are torch's own."""
    with init_empty_weights():
        model = Tied()
        assert model.first.weight.normal_() is model.first.weight
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model.first))
        with init_on_device("meta"):
            nested = nn.Linear(2, 2)
            normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))  # wraps parameters in parameters
    broken = nn.Module()
    with pytest.raises(KeyError), init_empty_weights():
        build_and_fail(broken)
    for module in (model, copied, pickled, nested, normed, broken):
        assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
        assert all(parameter.is_meta and "uniform_" not in vars(parameter) for parameter in module.parameters())
    assert copied.second.weight is copied.first.weight
    filled = model.first.to_empty(device="cpu")
    assert nn.init.uniform_(filled.weight, 2.0, 3.0).min() >= 2.0


def test_a_parameter_that_was_filled_is_one_to_initialize() -> None:
    """Whoever fills a weight while other models are still being built gets one that initializers change."""
    with init_empty_weights():
        model = nn.Linear(2, 2)
        set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2))
        assert nn.init.uniform_(model.weight, 2.0, 3.0).min() >= 2.0
        assert vars(model.weight) == {}
    assert type(model.weight) is nn.Parameter


def test_registered_parameters_carry_nothing_afterwards(tmp_path):
    """A parameter that lives on can be saved and loaded as data; inside, it becomes the same empty one twice."""
    parameter = nn.Parameter(torch.ones(2))
    with init_empty_weights():
        first, second = nn.Module(), nn.Module()
        first.weight = parameter
        second.weight = parameter
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert vars(parameter) == vars(first.weight) == {}
    torch.save(parameter, tmp_path / "parameter.pt")
    assert torch.equal(torch.load(tmp_path / "parameter.pt", weights_only=True), parameter)
