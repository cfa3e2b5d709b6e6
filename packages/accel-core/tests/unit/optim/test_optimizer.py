"""The wrapped optimizer."""

import copy
import pickle

import pytest
import torch

from accel_core.optim.optimizer import AcceleratedOptimizer, move_to_device
from accel_core.state import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


def _made(
    scaler: torch.amp.GradScaler | None = None, *, fused: bool = False
) -> tuple[torch.nn.Linear, AcceleratedOptimizer]:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=fused)
    return model, AcceleratedOptimizer(inner, scaler=scaler)


def test_it_is_an_optimizer_and_shows_the_wrapped_one() -> None:
    """Attributes are those of the optimizer inside, which a closure reaches once; its loss comes back."""
    model, wrapped = _made()
    assert isinstance(wrapped, torch.optim.Optimizer)
    wrapped.param_groups[0]["lr"] = 0.7
    assert wrapped.optimizer.param_groups[0]["lr"] == 0.7
    assert wrapped.defaults is wrapped.optimizer.defaults
    assert wrapped.state is wrapped.optimizer.state
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        losses.append(model(torch.ones(1, 2)).sum())
        losses[-1].backward()
        return losses[-1]

    assert [wrapped.step(closure)] == losses


def test_step_and_zero_grad_wait_for_the_window() -> None:
    """Inside a window nothing moves, gradients are kept and no closure is called."""
    model, wrapped = _made()
    before = model.weight.detach().clone()
    GradientState()._set_sync_gradients(False)
    model(torch.ones(1, 2)).sum().backward()
    assert wrapped.step(lambda: 1 / 0) is None
    wrapped.step()
    wrapped.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    GradientState()._set_sync_gradients(True)
    wrapped.step()
    wrapped.zero_grad()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_infinite_gradient_skips_the_step_and_says_so(bad: float, fused: bool) -> None:
    """Under the scaler a bad step changes nothing and is reported, by a fused optimizer too; the next is not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, wrapped = _made(scaler, fused=fused)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum() * bad).backward()
    wrapped.step()
    assert wrapped.step_was_skipped
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0
    wrapped.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    wrapped.step()
    assert not wrapped.step_was_skipped
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")])
def test_copies_and_pickles_work_on(scaler: torch.amp.GradScaler | None) -> None:
    """A copy steps its own weights, with a scaler and without, although a schedule was made for the wrapper."""
    model, wrapped = _made(scaler)
    torch.optim.lr_scheduler.StepLR(wrapped, 1)
    own = model.weight.detach().clone()
    for other in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert other.optimizer is not wrapped.optimizer
        held = other.param_groups[0]["params"][0]
        before = held.detach().clone()
        (other.scaler.scale(held.sum()) if scaler else held.sum()).backward()
        other.step()
        assert not torch.equal(held, before)
    assert model.weight.grad is None
    assert torch.equal(model.weight, own)


def test_modes_of_schedule_free_optimizers_pass_through() -> None:
    """Train and eval reach an optimizer that has them, and are harmless elsewhere."""
    schedulefree = pytest.importorskip("schedulefree", reason="needs the library schedulefree, not installed here")
    _, plain = _made()
    assert plain.train() is None
    assert plain.eval() is None
    model = torch.nn.Linear(2, 1)
    wrapped = AcceleratedOptimizer(schedulefree.SGDScheduleFree(model.parameters(), lr=0.1))
    wrapped.train()
    assert wrapped.optimizer.param_groups[0]["train_mode"] is True
    wrapped.eval()
    assert wrapped.optimizer.param_groups[0]["train_mode"] is False


def test_nests_are_moved_whole() -> None:
    """Every tensor of a nest is moved, and the types of its containers stay."""
    nest = {"a": [torch.ones(1), (torch.zeros(2), "text")], "b": 3}
    moved = move_to_device(nest, "meta")
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert isinstance(moved["a"][1], tuple)
    assert moved["a"][1][1] == "text"
    assert moved["b"] == 3


def test_counters_of_steps_stay_where_torch_counts() -> None:
    """Of a state that is moved, averages go to the device; what counts steps there would be waited for in each."""

    class Told(torch.optim.AdamW):
        def load_state_dict(self, state_dict: dict) -> None:
            self.told = state_dict["state"][0]

    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = Told(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    AcceleratedOptimizer(optimizer).place(torch.device("meta"))
    assert {name: value.device.type for name, value in optimizer.told.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
