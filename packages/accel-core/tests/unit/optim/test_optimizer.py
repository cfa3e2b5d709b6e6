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
    """Attributes are read from and written to the optimizer inside."""
    _, wrapped = _made()
    assert isinstance(wrapped, torch.optim.Optimizer)
    wrapped.param_groups[0]["lr"] = 0.7
    assert wrapped.optimizer.param_groups[0]["lr"] == 0.7
    assert wrapped.defaults is wrapped.optimizer.defaults
    assert wrapped.state is wrapped.optimizer.state


def test_step_and_zero_grad_wait_for_the_window() -> None:
    """Inside a window nothing moves and gradients are kept."""
    model, wrapped = _made()
    before = model.weight.detach().clone()
    GradientState()._set_sync_gradients(False)
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    wrapped.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    GradientState()._set_sync_gradients(True)
    wrapped.step()
    wrapped.zero_grad()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_closure_is_called_once() -> None:
    """A closure reaches the optimizer inside, and its loss comes back."""
    model, wrapped = _made()
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert isinstance(wrapped.step(closure), torch.Tensor)
    assert calls == [1]


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


def test_copies_and_pickles_work_on() -> None:
    """A copy steps its own optimizer."""
    model, wrapped = _made(torch.amp.GradScaler("cpu"))
    for other in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert other.optimizer is not wrapped.optimizer
        held = other.param_groups[0]["params"][0]
        before = held.detach().clone()
        other.scaler.scale(held.sum()).backward()
        other.step()
        assert not torch.equal(held, before)
    assert model.weight.grad is None


def test_an_optimizer_with_a_schedule_is_pickled() -> None:
    """A schedule made for the wrapper leaves nothing in it that cannot be pickled; the copy steps its own weights."""
    model, wrapped = _made()
    torch.optim.lr_scheduler.StepLR(wrapped, 1)
    other = pickle.loads(pickle.dumps(wrapped))
    held = other.param_groups[0]["params"][0]
    before, own = held.detach().clone(), model.weight.detach().clone()
    held.sum().backward()
    other.step()
    assert not torch.equal(held, before)
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
