"""Writes to offloaded weights take effect, or are refused where they happen; none is lost without a word."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from accel_bigmodel.hooks.state import get_state_dict_offloaded_model
from accel_core.checkpoint.weights import save_model
from accel_core.errors import OffloadError

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4) / 8

PLACEMENTS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, CPU),
    "disk": lambda model, folder: disk_offload(model, folder, CPU, prefetch=False),
    "disk, ahead": lambda model, folder: disk_offload(model, folder, CPU),
    "disk, with buffers": lambda model, folder: disk_offload(model, folder, CPU, offload_buffers=True),
    "map": lambda model, folder: dispatch_model(model, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir=folder),
}


class Decaying(nn.Linear):
    """A layer whose forward halves its weight while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve, then compute."""
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


def make() -> nn.Sequential:
    """Layers of one shape, the middle one with statistics of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Decaying(4, 4)).eval()


@pytest.fixture(params=PLACEMENTS)
def placed(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Sequential:
    """A model whose weights are away."""
    model = PLACEMENTS[request.param](make(), tmp_path / "offload")
    assert isinstance(model, nn.Sequential)
    return model


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.fill_(0),
        lambda weight: weight.detach().zero_(),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1),
        lambda weight: weight[0].add_(1),
        lambda weight: nn.init.zeros_(weight),
        lambda weight: nn.init.kaiming_uniform_(weight),
        lambda weight: torch.add(weight, 1, out=weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: weight.copy_(torch.ones(4, 4)),
        lambda weight: setattr(weight, "data", torch.ones(4, 4)),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: setattr(weight, "data", torch.ones(4, 4, device="meta")),
        lambda weight: nn.utils.vector_to_parameters(torch.ones(16), [weight]),
    ],
)
def test_a_write_to_a_weight_that_is_away_is_refused(placed: nn.Sequential, write: Callable[[Any], object]) -> None:
    """In place, through `data`, by `nn.init`, with `out`: the error stands at that line and names the weight."""
    expected = placed.eval()(X)
    with torch.no_grad(), pytest.raises(OffloadError, match=r"(cannot be written to|used outside).*'0\.weight'"):
        write(placed[0].weight)
    assert torch.equal(placed(X), expected)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_loading_a_state_dict_into_it_is_refused(placed: nn.Sequential) -> None:
    """`load_state_dict` lists the weights that it could not write to."""
    with pytest.raises(RuntimeError, match=r"cannot be written to while it is away"):
        placed.load_state_dict(make().state_dict())


def test_a_new_parameter_takes_effect(placed: nn.Sequential) -> None:
    """Assigned to the module it is computed with, saved, trained, and kept when the hooks go; others are as before."""
    plain = make().eval()
    placed.eval()(X)
    for model in (plain, placed):
        model[0].weight = nn.Parameter(torch.eye(4))
        model[2].bias = None
    for _ in range(2):
        assert torch.equal(placed(X), plain(X))
    saved = get_state_dict_offloaded_model(placed)
    assert {name: value.tolist() for name, value in saved.items()} == {
        name: value.tolist() for name, value in plain.state_dict().items()
    }
    placed.requires_grad_(False)
    placed[0].weight.requires_grad_(True)
    optimizer = torch.optim.SGD([placed[0].weight], lr=1.0)
    placed(X).sum().backward()
    optimizer.step()
    plain(X).sum().backward()
    torch.optim.SGD([plain[0].weight], lr=1.0).step()
    assert torch.equal(placed(X), plain(X))
    remove_hook_from_submodules(placed)
    assert torch.equal(placed(X), plain(X))


def test_ties_made_by_hand_take_effect(placed: nn.Sequential) -> None:
    """One layer's offloaded weight given to another is computed with in both, saved, and tied without the hooks."""
    plain = make().eval()
    placed.eval()(X)
    for model in (plain, placed):
        model[2].weight = model[0].weight
    for _ in range(2):
        assert torch.equal(placed(X), plain(X))
    assert torch.equal(get_state_dict_offloaded_model(placed)["2.weight"], plain[0].weight)
    remove_hook_from_submodules(placed)
    assert torch.equal(placed(X), plain(X))
    assert placed[2].weight is placed[0].weight


def test_a_parameter_from_an_offloaded_weight_is_refused(placed: nn.Sequential) -> None:
    """It holds no values: the forward that would use it says which weight it was made from, and goes on when undone."""
    expected = placed.eval()(X)
    before = placed[0].weight
    placed[0].weight = nn.Parameter(placed[0].weight * 2)
    with pytest.raises(OffloadError, match=r"made from '0\.weight' in the place of 'weight' of Linear"):
        placed(X)
    placed[0].weight = before
    assert torch.equal(placed(X), expected)


def test_averaging_a_model_that_is_away_is_refused(placed: nn.Sequential) -> None:
    """A copy for weight averaging computes what the model does, and its update raises instead of averaging nothing."""
    average = torch.optim.swa_utils.AveragedModel(placed.eval())
    assert torch.equal(average(X), placed(X))
    for _ in range(2):
        with pytest.raises(OffloadError, match="cannot be written to"):
            average.update_parameters(placed)


@pytest.mark.parametrize("through_data", [False, True])
def test_writes_under_align_module_device_stay(placed: nn.Sequential, through_data: bool) -> None:
    """What is written while the weights are held is computed with, saved, and there without the hooks."""
    plain = make().eval()
    placed.eval()(X)
    for model in (plain, placed):
        with align_module_device(model[0]), torch.no_grad():
            (model[0].weight.data if through_data else model[0].weight).mul_(3)
            assert torch.equal(placed(X), plain(X)) or model is plain
            assert not model[0].weight.is_meta
    assert placed[0].weight.is_meta
    for _ in range(2):
        assert torch.equal(placed(X), plain(X))
    assert torch.equal(get_state_dict_offloaded_model(placed)["0.weight"], plain[0].weight)
    twin = pickle.loads(pickle.dumps(placed))
    assert torch.equal(twin(X), plain(X))
    remove_hook_from_submodules(placed)
    assert torch.equal(placed(X), plain(X))


def test_what_a_forward_writes_stays(placed: nn.Sequential) -> None:
    """Statistics that a forward updates, and a weight that it scales, are those of the plain model afterwards."""
    plain = make()

    for model in (plain, placed):
        model.train()
        for _ in range(3):
            model(X)
        model.eval()
    assert torch.equal(placed(X), plain(X))
    saved = get_state_dict_offloaded_model(placed)
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    remove_hook_from_submodules(placed)
    assert all(torch.equal(placed.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_a_write_that_the_map_cannot_take_is_refused() -> None:
    """A weights map that is read-only makes the write an error; the model goes on with the weight of before."""
    model = nn.Linear(4, 4)
    weights = MappingProxyType({name: value.double() for name, value in model.state_dict().items()})
    add_hook_to_module(model, AlignDevicesHook(CPU, offload=True, weights_map=weights))
    expected = model(X)
    error = pytest.raises(OffloadError, match=r"weights map cannot take the new value; got 'weight' of Linear")
    with error, align_module_device(model), torch.no_grad():
        model.weight.zero_()
    assert model.weight.is_meta
    assert torch.equal(model(X), expected)


def test_a_state_dict_without_values_cannot_be_saved(placed: nn.Sequential, tmp_path: Path) -> None:
    """`torch.save(model.state_dict())` names the weight, and says what to save; copies of the state dict are fine."""
    state = copy.deepcopy(placed.state_dict())
    with pytest.raises(OffloadError, match=r"no values; got '0\.weight'.*get_state_dict_offloaded_model"):
        torch.save(state, tmp_path / "state.pt")
    with pytest.raises(OffloadError, match=r"no values"):
        pickle.dumps(placed[0].weight.detach())
    torch.save(get_state_dict_offloaded_model(placed), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt").keys() == make().state_dict().keys()


class Doubling(AlignDevicesHook):
    """Does something around a forward besides."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Double the weight, for good."""
        args, kwargs = super().pre_forward(module, *args, **kwargs)
        with torch.no_grad():
            module.weight.mul_(2)  # type: ignore[union-attr, operator]
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Negate the output."""
        return -super().post_forward(module, output)


def test_what_a_subclass_does_around_a_forward_is_done() -> None:
    """Overridden events are called, with the weights there, for forwards and when they are called by hand."""
    plain, model = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    weight = plain.weight.detach().clone()
    model.load_state_dict(plain.state_dict())
    add_hook_to_module(model, Doubling(CPU, offload=True, io_same_device=True))
    for doublings in (1, 2):
        assert torch.equal(model(X), -nn.functional.linear(X, weight * 2**doublings))
    hook = model._hf_hook
    hook.pre_forward(model)
    assert torch.equal(model.weight, weight * 8)
    hook.post_forward(model, X)
    assert model.weight.is_meta


@pytest.mark.parametrize("kind", ["parameter", "narrowed"])
def test_changes_while_offloaded_stay_without_the_hooks(placed: nn.Sequential, kind: str) -> None:
    """Frozen or cast to another dtype after the dispatch, the weights are so when they come back."""
    plain = make()
    for model in (plain, placed):
        if kind == "parameter":
            model[0].requires_grad_(False)
        else:
            for module in model:
                module.to(torch.bfloat16)
    remove_hook_from_submodules(placed)
    for (name, one), (_, other) in zip(placed.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.requires_grad, one.dtype) == (other.requires_grad, other.dtype), name
        assert torch.equal(one, other)


class Counting(nn.Module):
    """Counts forwards in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the count."""
        with torch.no_grad():
            self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("place", [*PLACEMENTS, "file", "file, ahead", "file, cast", "file, cast, ahead"])
def test_writes_of_a_forward_are_in_its_copies_alone(
    copied: Callable[[nn.Module], nn.Module], place: str, tmp_path: Path
) -> None:
    """What a forward writes to a parameter goes on in a copy from there, and another model of the file begins anew."""

    def made() -> nn.Module:
        model = nn.Sequential(Counting(), Counting(), Counting())
        if place in PLACEMENTS:
            return PLACEMENTS[place](model, tmp_path / "offload")
        prefetch = None if "ahead" in place else False
        return load_checkpoint_and_dispatch(model.to("meta"), tmp_path, device_map={"": "disk"}, prefetch=prefetch)

    stored = nn.Sequential(Counting(), Counting(), Counting())
    save_model(stored.to(torch.float64) if "cast" in place else stored, None, tmp_path)
    model, other = made(), made()
    for forwards in (1, 2):
        assert torch.equal(model(X), X + 3 * forwards)
    twin = copied(model)
    assert torch.equal(twin(X), X + 9)
    assert torch.equal(twin(X), X + 12)
    assert torch.equal(model(X), X + 9)
    assert torch.equal(other(X), X + 3)
    assert all(torch.equal(value, torch.full((4,), 3.0)) for value in get_state_dict_offloaded_model(model).values())


@pytest.mark.parametrize("layout", [lambda weight: weight[:1].expand(4, 4), lambda weight: weight.t()[:, ::2]])
def test_a_weight_of_any_layout_comes_back(layout: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Expanded or strided, it is the same without the hooks."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(layout(model.weight.detach()))
    before = model.weight.detach().clone()
    disk_offload(model, tmp_path, CPU)
    remove_hook_from_submodules(model)
    assert torch.equal(model.weight, before)


def test_a_view_of_a_tied_weight_is_not_taken_for_it() -> None:
    """A weight that begins where a tied one does, transposed or a part of it, is computed with as it is."""
    weight = nn.Parameter(torch.arange(16.0).view(4, 4))
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)], nn.Linear(4, 1, bias=False))
    model[0].weight = model[1].weight = weight
    model[2].weight, model[3].weight = nn.Parameter(weight.detach().t()), nn.Parameter(weight.detach()[:1])
    expected = model(X)
    tied: dict[int, dict[torch.device, torch.Tensor]] = {weight.data_ptr(): {CPU: weight}}
    for name in ("2.weight", "3.weight"):
        set_module_tensor_to_device(model, name, CPU, tied_params_map=tied)
    assert torch.equal(model(X), expected)
    attach_align_device_hook(model, CPU, offload=True, weights_map=dict(model.state_dict()), tied_params_map=tied)
    model[0]._hf_hook.pre_forward(model[0])
    assert torch.equal(model(X), expected)
