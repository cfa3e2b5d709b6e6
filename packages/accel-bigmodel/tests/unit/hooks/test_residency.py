"""Offloaded weights are right or an error, and come back when the hooks go."""

import copy
import gc
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks.residency import residencies_of
from accel_bigmodel.hooks.state import get_state_dict_offloaded_model
from accel_bigmodel.offload.prefetch import Weights
from accel_bigmodel.offload.schedule import Schedule
from accel_core.errors import OffloadError
from accel_core.modules import offloaded

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4) / 8


def schedules_of(model: nn.Module) -> list[Schedule[Weights]]:
    """List the schedules that a model's weights travel by."""
    bindings = [residency.binding for module in model.modules() for residency in residencies_of(module)]
    return list(dict.fromkeys(binding.schedule for binding in bindings if binding is not None))


class Tree(nn.Module):
    """A random tree whose leaves are layers, some of which share weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.bare = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.rand(1))
        self.parts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if draw.random() < 0.5 else nn.Linear(4, 4, bias=False)
                for _ in range(draw.randint(1, 5))
            ]
        )
        layers = [module for module in self.modules() if isinstance(module, nn.Linear)]
        for _ in range(draw.randint(0, 2)):
            draw.choice(layers).weight = draw.choice(layers).weight
        self.order = [draw.randrange(len(self.parts)) for _ in range(draw.randint(1, 6))]
        self.fails_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the parts in an order in which some come twice."""
        x = x * self.scale + self.bare
        for step, number in enumerate(self.order):
            if step == self.fails_at:
                raise KeyError("in the middle")
            x = x + self.parts[number](x)
        return x


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), grad=st.booleans(), fails=st.booleans(), prefetch=st.booleans())
def test_offload_and_prefetch_differ_from_memory_only_in_timing(
    seed: int, grad: bool, fails: bool, prefetch: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random trees with ties, with and without grad, with an exception in mid-forward: outputs and gradients equal."""
    plain = Tree(seed).requires_grad_(False)
    model = copy.deepcopy(plain)
    folder = tmp_path_factory.mktemp("offload")
    disk_offload(model, folder, CPU, prefetch=prefetch)
    with torch.set_grad_enabled(grad):
        for number in range(3):
            if fails and number == 1:
                model.fails_at = random.Random(seed).randrange(len(model.order))
                with pytest.raises(KeyError, match="in the middle"):
                    model(X)
                model.fails_at = None
                assert all(p.is_meta for p in model.parameters())
            x, y = X.clone().requires_grad_(grad), X.clone().requires_grad_(grad)
            out, expected = model(x), plain(y)
            assert torch.equal(out, expected)
            if grad:
                out.sum().backward()
                expected.sum().backward()
                assert torch.equal(x.grad, y.grad)
    assert bool(schedules_of(model)) == prefetch
    assert all(schedule.held == 0 for schedule in schedules_of(model))
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), plain(X))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.state_dict().items())
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]


def test_a_weight_used_without_its_module_is_named() -> None:
    """F.linear on a child's offloaded weight names weight and block; listing the class makes it work."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.child.weight)

    model = nn.Sequential(Uses())
    expected = model(X)
    twin = copy.deepcopy(model)
    cpu_offload(model, CPU)
    with pytest.raises(OffloadError, match=r"'0\.child\.weight' of block '0\.child'.*preload_module_classes"):
        model(X)
    cpu_offload(twin, CPU, preload_module_classes=["Uses"])
    assert torch.equal(twin(X), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("away", ["cpu", "disk", "map"])
def test_torchs_own_transformer_layers_run_offloaded(tmp_path: Path, away: str, training: bool) -> None:
    """Attention and encoder layers of torch, which read the weights of submodules by themselves, need no list."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "decoder": decoder})
    model.train(training)
    rows = torch.randn(2, 3, 4)

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(training):
            return model["decoder"](rows, model["encoder"](rows)).detach()

    expected = run()
    if away == "cpu":
        cpu_offload(model, CPU)
    elif away == "disk":
        disk_offload(model, tmp_path, CPU)
    else:
        places = {"encoder.layers.0": "disk", "encoder.layers.1": "cpu", "decoder": "disk"}
        dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(run(), expected)
    assert torch.equal(run(), expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.to("cpu"),
        lambda weight: weight.sum().item(),
        lambda weight: torch.ones(4, 4) @ weight,
        lambda weight: torch.ones(4, 4) + weight.t(),
        lambda weight: torch.ones(4, 4).copy_(weight),
        lambda weight: weight.detach().numpy(),
    ],
)
def test_reading_a_placeholder_raises(use: object) -> None:
    """Every way to its values ends in our error; shapes and dtypes are answered."""
    model = cpu_offload(nn.Linear(4, 4), CPU)
    assert model.weight.shape == (4, 4)
    assert model.weight.device.type == "meta"
    assert isinstance(model.weight, nn.Parameter)
    assert torch.empty_like(model.weight, device="cpu").shape == (4, 4)
    assert "weight" in dict(model.named_parameters())
    assert callable(use)
    with pytest.raises(OffloadError, match="used outside the forward pass"):
        use(model.weight)


def test_training_an_offloaded_weight_raises() -> None:
    """A gradient for it, and an optimizer over it, built before or after, raise; the weight is as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = model(X)
    cpu_offload(model, CPU)
    with pytest.raises(OffloadError, match=r"gradient for .*requires_grad_\(False\)"):
        model(X).sum().backward()
    for optimizer in (before, torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(OffloadError, match="cannot train an offloaded weight"):
            optimizer.step()
    assert torch.equal(model(X), expected)
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), [x])
    assert gradient.shape == x.shape


def test_removing_hooks_gives_the_same_parameters_back() -> None:
    """The parameters are the same objects, tied as before, and an optimizer built before trains them again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    cpu_offload(model, CPU)
    model(X)
    remove_hook_from_submodules(model)
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert model[1].weight is model[0].weight
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    model(X).sum().backward()
    optimizer.step()


def test_moving_a_dispatched_model_warns_or_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.to` warns while all weights are there, and raises when some are offloaded."""
    model = dispatch_model(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path
    )
    with pytest.raises(OffloadError, match="can't move a model"):
        model.to("cpu")
    with pytest.raises(OffloadError, match="can't move a model"):
        model.cuda()
    there = dispatch_model(nn.Sequential(nn.Linear(4, 4)), {"": "cpu"}, force_hooks=True)
    assert there.to("cpu") is there
    assert "shouldn't move a model" in caplog.text


def test_one_device_is_a_plain_move() -> None:
    """Without `force_hooks` a map with one device puts no hooks on; the map is kept."""
    model = dispatch_model(nn.Linear(4, 4), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}


def test_align_module_device_moves_a_plain_module_for_a_while() -> None:
    """Inside, the weights are where they were asked to be; outside they are the ones from before."""
    plain = nn.Linear(4, 4)
    weight = plain.weight
    with align_module_device(plain, torch.device("meta")):
        assert plain.weight.is_meta
    assert plain.weight is weight


def test_the_core_reads_the_state_of_an_offloaded_model(tmp_path: Path) -> None:
    """The state dict holds every value, offloaded and tied ones too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    disk_offload(model, tmp_path, CPU)
    for found in (offloaded.state_dict(model), get_state_dict_offloaded_model(model)):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.slow
def test_nothing_is_kept_alive_over_forwards(tmp_path: Path) -> None:
    """Fifty forwards leave no more tensors than two, and the model can be collected."""
    model = disk_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, CPU)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    for _ in range(2):
        model(X)
    before = alive()
    for _ in range(50):
        model(X)
    assert alive() <= before


def test_one_recursive_module_keeps_its_weights_until_it_is_done() -> None:
    """A forward that calls itself finds its weights in the outer call afterwards."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 2)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if depth:
                x = self(x, depth - 1)
            return x @ self.weight

    model = Recursive()
    expected = model(X)
    cpu_offload(model, CPU)
    assert torch.equal(model(X), expected)
    assert model.weight.is_meta


def test_layers_are_stored_narrow_and_computed_wide() -> None:
    """Layerwise casting keeps float8 weights between forwards, skips what it is told to, and survives errors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="^2$")
    assert model[0].weight.dtype == torch.float8_e4m3fn
    assert model[1].weight.dtype == model[2].weight.dtype == torch.float32
    assert model(X).dtype == torch.float32
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    assert model[0].weight.dtype == torch.float8_e4m3fn


def test_models_in_a_pipeline_take_turns() -> None:
    """The hook of the model before is offloaded when the next one runs."""
    first, hook_1 = cpu_offload_with_hook(nn.Linear(4, 4), CPU)
    second, hook_2 = cpu_offload_with_hook(nn.Linear(4, 4), CPU, prev_module_hook=hook_1)
    assert second(first(X)).shape == X.shape
    hook_2.offload()
    hook_2.remove()
    assert "forward" not in second.__dict__


def test_disk_weights_in_safetensors_take_no_copy(tmp_path: Path) -> None:
    """The loaded weight is a view of the file's map, and pages are given back."""
    model = nn.Linear(4, 4)
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    index = {name: {"safetensors_file": str(file), "weight_name": name} for name in model.state_dict()}
    expected = model(X)
    dispatch_model(model, {"": "disk"}, offload_index=index)
    store = model._hf_hook.hooks[0].weights_map.dataset if hasattr(model._hf_hook, "hooks") else None
    store = store or model._hf_hook.weights_map.dataset
    address = store.stored("weight").data_ptr()
    seen: list[int] = []
    model.register_forward_hook(lambda module, *_: seen.append(0))
    hook = model._hf_hook.hooks[0] if hasattr(model._hf_hook, "hooks") else model._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    hook.enter_forward(model)
    assert model.weight.data_ptr() == address
    hook.leave_forward(model, None)
    hook.pre_forward(model)
    assert model.weight.data_ptr() != address
    hook.post_forward(model, None)
    assert torch.equal(model(X), expected)


def test_a_weight_of_another_shape_holds_no_memory(tmp_path: Path) -> None:
    """A block whose weights cannot be put in place is let go of: the schedule holds nothing, the next pass is right."""
    plain = Tree(3).requires_grad_(False)
    model = copy.deepcopy(plain)
    disk_offload(model, tmp_path, CPU)
    model(X)
    (schedule,) = schedules_of(model)
    replaced = schedule.order[-1].source
    replaced.store.state_dict[replaced.names[0]] = torch.zeros(7)
    with pytest.raises(OffloadError, match=r"shape of its parameter.*\(7,\)"):
        model(X)
    assert schedule.held == 0
    del replaced.store.state_dict[replaced.names[0]]
    assert torch.equal(model(X), plain(X))
    assert schedule.held == 0
