"""Accumulation windows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from accel_core.accelerator import Accelerator
from accel_core.optim import accumulation as accumulation_module
from accel_core.optim.accumulation import Accumulation
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.process.world import ensure
from accel_core.state import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


class _Loader:
    remainder = -1

    def __init__(self, length: int) -> None:
        self.length = length
        self.end_of_dataloader = False

    def __len__(self) -> int:
        return self.length

    def read(self, state: GradientState, batches: int):
        state._add_dataloader(self)
        for index in range(batches):
            self.end_of_dataloader = index == self.length - 1
            state._advance(self)
            yield index
        state._remove_dataloader(self)


def test_window_goes_on_where_the_end_of_data_does_not_end_it() -> None:
    """With sync_with_dataloader=False windows run across epochs."""
    state = GradientState(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    accumulation = Accumulation(state)
    syncs = [accumulation.advance() for _ in range(2) for _ in _Loader(3).read(state, 3)]
    assert syncs == [False, True, False, True, False, True]
    assert accumulation.divisor == 2


@pytest.mark.parametrize(("num_steps", "asked"), [(1, 0), (4, 3)])
def test_length_of_the_data_is_asked_once_for_a_window(num_steps: int, asked: int) -> None:
    """Loaders compute their length anew each time: windows of one batch never ask, longer ones at their start."""

    class Counting(_Loader):
        lengths = 0

        def __len__(self) -> int:
            self.lengths += 1
            return self.length

    state = GradientState(GradientAccumulationPlugin(num_steps=num_steps))
    accumulation, loader = Accumulation(state), Counting(10)
    assert [accumulation.advance() for _ in loader.read(state, 10)][-1]
    assert loader.lengths == asked


@pytest.mark.parametrize("short_window", ["actual", "full"])
@pytest.mark.parametrize(("before", "after", "at"), [(1, 4, 5), (4, 6, 4), (2, 3, 4), (6, 4, 6), (3, 1, 3)])
def test_a_number_of_steps_that_changes_between_windows(before: int, after: int, at: int, short_window: Any) -> None:
    """From then on losses are divided by the real length of each window, or where that is asked for by the number."""
    state = GradientState(GradientAccumulationPlugin(num_steps=before, short_window=short_window))
    accumulation = Accumulation(state)
    windows: list[list[int]] = [[]]
    for index in _Loader(20).read(state, 20):
        if index == at:
            windows = [[]]
            state.plugin_kwargs.update(num_steps=after)
        sync = accumulation.advance()
        windows[-1].append(accumulation.divisor)
        if sync:
            windows.append([])
    assert windows.pop() == []
    assert sum(map(len, windows)) == 20 - at
    assert all(set(window) == {len(window) if short_window == "actual" else after} for window in windows)


def test_epoch_broken_off_keeps_the_count() -> None:
    """A break inside a window does not drop what was accumulated."""
    state = GradientState(GradientAccumulationPlugin(num_steps=3))
    accumulation = Accumulation(state)
    assert [accumulation.advance() for _ in _Loader(9).read(state, 2)] == [False, False]
    assert [accumulation.advance() for _ in _Loader(9).read(state, 3)] == [True, False, False]


def test_a_number_as_weight_is_made_on_the_device() -> None:
    """It is filled in, and not copied: for a copy a host would wait until the forward pass is computed."""
    accumulation, loss = Accumulation(GradientState()), torch.zeros(())
    with _Called() as called:
        accumulation.share_of(loss, 3)
    assert "full" in called.names
    assert not {"as_tensor", "tensor"} & set(called.names)
    assert accumulation.close_weighted(ensure()) == pytest.approx(1 / 3)


class _Called(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Run:
    """A model that is trained two batches to a step."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def batch(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Train one batch, with something else done inside of it, and return whether the optimizer stepped."""
        before = self.model.weight.detach().clone()
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.ones(1, 1)).sum())
            meanwhile()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return not torch.equal(before, self.model.weight)


def test_two_accelerators_of_one_thread_take_turns() -> None:
    """Batches of two Accelerators inside and beside one another are counted each for itself."""
    first, second = _Run(), _Run()
    inner: list[bool] = []
    assert [first.batch(lambda: inner.append(second.batch())) for _ in range(2)] == [False, True]
    assert inner == [False, True]


def test_a_batch_writes_nothing_into_its_classes() -> None:
    """What a step notes lies in objects: after each write into a class, Python looks all of its methods up anew."""
    run, seen = _Run(), []
    kinds = [each for each in vars(accumulation_module).values() if isinstance(each, type)]
    before = [dict(vars(kind)) for kind in kinds]
    for _ in range(2):
        run.batch(lambda: seen.append([dict(vars(kind)) for kind in kinds]))
    assert Accumulation in kinds
    assert seen == [before, before]
