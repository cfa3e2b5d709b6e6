"""What every strategy has to do, as a class of tests to subclass.

    from accel_testing.conformance.strategy import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        strategy = MyStrategy

Each test runs on real gloo ranks, trains a small model through `Accelerator`, and compares with plain PyTorch in one
process on all the data. Numbers are doubles, so a gradient that is wrong by a factor cannot hide in rounding; an engine
that computes in 32 bits says so and is compared to 1e-6.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_core._records import record
from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import load_model
from accel_core.comm.objects import gather_object
from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import PreparationError, StateError
from accel_core.mesh.layout import GROUPS
from accel_core.options.engines import engines
from accel_core.process.world import ensure
from accel_core.random import set_seed
from accel_core.state import reset_all
from accel_core.strategies.registry import register_strategy
from accel_core.strategies.strategy import Strategy
from accel_testing.world import imported, run

_FEATURES, _BATCH, _GLOBAL_BATCHES = 4, 2, 5


@record(frozen=True)
class Case:
    """One way to train.

    Attributes:
        accumulation: Batches of one step. The data has five global batches, so 2 and 3 end in a short window.
        weighted: Losses are sums over units, whose numbers differ between samples and may be 0.
        clip: Largest norm of the gradient, or `None`.
        uneven: The last global batch lacks samples, in place of which those of the beginning are repeated.
        clip_value: Largest element of the gradient, or `None`.
    """

    accumulation: int = 1
    weighted: bool = False
    clip: float | None = None
    uneven: bool = False
    clip_value: float | None = None


@record(frozen=True)
class Refusal:
    """Something that a strategy refuses.

    Attributes:
        act: Does it, with a fresh Accelerator.
        error: What is raised.
        message: What the message says, as a regular expression.
    """

    act: Callable[[Accelerator], Any]
    error: type[Exception]
    message: str


CASES: tuple[Case, ...] = (
    Case(),
    Case(accumulation=2),
    Case(accumulation=3, clip=0.05, uneven=True),
    Case(weighted=True, uneven=True),
    Case(accumulation=2, weighted=True, clip=0.05),
)


def model(seed: int = 3, dtype: torch.dtype = torch.double) -> nn.Module:
    """Return a small model with the same weights wherever this is called."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose result shows a wrong size of any gradient, and in 32 bits does not blow rounding up."""
    double = next(net.parameters()).dtype is torch.double
    return torch.optim.SGD(net.parameters(), lr=0.2 if double else 0.02, momentum=0.9)


def samples(count: int, dtype: torch.dtype = torch.double) -> TensorDataset:
    """Return features, targets and numbers of units of `count` samples."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, _FEATURES, generator=generator, dtype=dtype)
    return TensorDataset(x, x.sin().sum(1, keepdim=True), (torch.arange(count) % 4).to(dtype)[:, None])


def _loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor, units: torch.Tensor, *, weighted: bool) -> torch.Tensor:
    errors: torch.Tensor = (net(x) - y).square()
    return (errors * units).sum() if weighted else errors.mean()


def plain(
    net: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, size: int, case: Case, epochs: int
) -> list[float]:
    """Train in one process on batches of `size` samples; return the norms of all gradients before they were clipped."""
    norms: list[float] = []
    batches = list(DataLoader(data, batch_size=size))
    for _ in range(epochs):
        for start in range(0, len(batches), case.accumulation):
            window = batches[start : start + case.accumulation]
            optimizer.zero_grad()
            total = sum(float(units.sum()) for *_, units in window) if case.weighted else len(window)
            for x, y, units in window:
                (_loss(net, x, y, units, weighted=case.weighted) / total).backward()  # type: ignore[no-untyped-call]
            if case.clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), case.clip)))
            if case.clip_value is not None:
                nn.utils.clip_grad_value_(net.parameters(), case.clip_value)
            optimizer.step()
    return norms


def train(
    accelerator: Accelerator,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    case: Case,
    epochs: int,
    loss_of: Callable[..., torch.Tensor] = _loss,
) -> list[float]:
    """Train through an Accelerator; return the norms of all gradients before they were clipped."""
    norms: list[float] = []
    for _ in range(epochs):
        for x, y, units in loader:
            with accelerator.accumulate(net):
                loss = loss_of(net, x, y, units, weighted=case.weighted)
                accelerator.backward(loss, weight=units.sum() if case.weighted else None)
                if accelerator.sync_gradients and case.clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), case.clip)))
                if accelerator.sync_gradients and case.clip_value is not None:
                    accelerator.clip_grad_value_(net.parameters(), case.clip_value)
                optimizer.step()
                optimizer.zero_grad()
    return norms


class StrategyConformance:
    """Tests of a strategy; subclass it, and set `strategy`.

    Attributes:
        strategy: The class under test.
        sizes: Numbers of ranks to run on.
        clips_elements: Whether gradients can be clipped by value; a strategy that cannot refuses.
        synchronises_late: Whether a forward under `no_sync` can be followed by a backward that synchronizes; a strategy
            that cannot refuses.
        dtype: In which numbers models are trained; with 32 bits, results are compared to 1e-6.
        optimizers_follow: Whether an optimizer can be prepared after its model; a strategy that takes both at once
            refuses.
        state_everywhere: Whether every rank gets whole states; else the first rank does.
        loss_of: Computes the loss of a model on features, targets and numbers of units, with `weighted` as in `Case`;
            for a strategy whose models return losses.
    """

    strategy: ClassVar[type[Strategy]]
    sizes: ClassVar[tuple[int, ...]] = (2, 4)
    clips_elements: ClassVar[bool] = True
    synchronises_late: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.double
    optimizers_follow: ClassVar[bool] = True
    state_everywhere: ClassVar[bool] = True
    loss_of: ClassVar[Callable[..., torch.Tensor]] = staticmethod(_loss)

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `Accelerator` that the strategy needs, such as its plugin."""
        return {}

    def refusals(self) -> Sequence[Refusal]:
        """Return what the strategy refuses beyond what all refuse."""
        return ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make each check a test of its own on each number of ranks."""
        metafunc.parametrize("size", self.sizes, ids=[f"{size} ranks" for size in self.sizes])
        metafunc.parametrize("check", list(self._checks(Path())))

    def test_conforms(self, size: int, check: str, tmp_path: Path) -> None:
        """The strategy passes the check on so many ranks."""
        source = inspect.getsourcefile(type(self))
        run(_call, size, (source, type(self).__qualname__, check, tmp_path))

    def _checks(self, folder: Path) -> dict[str, Callable[[], None]]:
        """Return what the suite checks on ranks, by name."""
        return {
            **{f"equals_one_process {case}": partial(self._equals_one_process, case) for case in CASES},
            "backward_can_synchronise_late": self._synchronises_late,
            "batches_without_rows_train": self._trains_on_nothing,
            "elements_are_clipped": self._clips_elements,
            "unwrapping_gives_the_model_back": self._unwraps,
            "preparing_twice_changes_nothing": self._prepares_twice,
            "seeds_are_equal_inside_a_replica": self._seeds,
            "state_is_restored": partial(self._restores, folder / "own", fresh=False),
            "another_run_resumes": partial(self._restores, folder / "another", fresh=True),
            "saved_model_is_the_plain_one": partial(self._saves_model, folder),
            "data_is_read_once": partial(self._reads_once, dispatch=False),
            "dispatched_data_is_read_once": partial(self._reads_once, dispatch=True),
            "what_cannot_train_is_refused": self._refuses,
        }

    def _everything(self, folder: Path, *, without: tuple[str, ...] = ()) -> None:
        """Run the suite in one group of ranks, without the checks that are named."""
        for name, check in self._checks(folder).items():
            if name not in without:
                check()
                reset_all()

    def _accelerator(self, case: Case = CASES[0]) -> Accelerator:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation, **self.arguments())
        assert type(accelerator._runtime.strategy) is self.strategy, "the strategy under test was not chosen"
        return accelerator

    def _equals_one_process(self, case: Case) -> None:
        """Weights, and norms of gradients, are those of one process on all the data, on every rank."""
        accelerator = self._accelerator(case)
        size = _BATCH * accelerator._runtime.layout.replicas
        count = _GLOBAL_BATCHES * size - (size // 2 + 1 if case.uneven else 0)
        data, expected = self._samples(count), self._model()
        repeated = _GLOBAL_BATCHES * size - len(data) if size > _BATCH else 0  # one replica takes a short batch
        whole = TensorDataset(*(torch.cat([column, column[:repeated]]) for column in data.tensors))
        norms = plain(expected, optimizer_of(expected), whole, size, case, epochs=2)
        net, optimizer, loader = self._prepared(accelerator, data)
        own = train(accelerator, net, optimizer, loader, case, 2, self.loss_of)
        self._close(own, norms)
        self._close(self._state(accelerator, net), dict(expected.state_dict()))

    def _synchronises_late(self) -> None:
        """A backward inside trigger_sync_in_backward completes gradients of forwards under no_sync, or is refused."""
        accelerator = self._accelerator()
        layout = accelerator._runtime.layout
        expected = self._model()
        data = self._samples(2 * _BATCH * layout.replicas)
        plain(expected, optimizer_of(expected), data, _BATCH * layout.replicas, Case(accumulation=2), epochs=1)
        net, optimizer, loader = self._prepared(accelerator, data)
        with self._refused_unless(self.synchronises_late, "no_sync"):
            with accelerator.no_sync(net):
                first, second = (self.loss_of(net, *batch, weighted=False) / 2 for batch in loader)
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(net):
                    accelerator.backward(second)
            optimizer.step()
            self._close(self._state(accelerator, net), dict(expected.state_dict()))

    def _trains_on_nothing(self) -> None:
        """Replicas whose data has ended train on empty batches while others continue; weights are those of all rows."""
        case = Case(weighted=True)
        accelerator = self._accelerator(case)
        layout = accelerator._runtime.layout
        size = _BATCH * layout.replicas
        data, expected = self._samples(2 * size + _BATCH), self._model()
        plain(expected, optimizer_of(expected), data, size, case, epochs=1)
        own = [row for row in range(len(data)) if row // _BATCH % layout.replicas == layout.part]
        net = self._model()
        net, optimizer = accelerator.prepare(net, optimizer_of(net))
        stream = DataLoader(_Rows([data[row] for row in own]), batch_size=_BATCH)
        loader = prepare_data_loader(stream, sharding="local", uneven_end="empty", layout=layout)
        train(accelerator, net, optimizer, loader, case, 1, self.loss_of)
        self._close(self._state(accelerator, net), dict(expected.state_dict()))

    def _clips_elements(self) -> None:
        """Clipping by value gives the weights of one process, or is refused by name."""
        with self._refused_unless(self.clips_elements, "clip"):
            self._equals_one_process(Case(clip_value=0.01))

    def _refused_unless(self, possible: bool, message: str) -> AbstractContextManager[Any]:
        return nullcontext() if possible else pytest.raises(PreparationError, match=message)

    def _restores(self, folder: Path, *, fresh: bool) -> None:
        """A run, or a second Accelerator of the same strategy, goes back to what was saved and trains on as before."""
        case = Case(accumulation=2, clip=0.05)
        accelerator = self._accelerator(case)
        data = self._samples(_GLOBAL_BATCHES * _BATCH * accelerator._runtime.layout.replicas)
        net, optimizer, loader = self._prepared(accelerator, data)
        train(accelerator, net, optimizer, loader, case, 1, self.loss_of)
        accelerator.save_state(str(folder / "state"))
        saved = self._state(accelerator, net)
        train(accelerator, net, optimizer, loader, case, 1, self.loss_of)
        after = self._state(accelerator, net)
        assert any(not torch.equal(saved[name], after[name]) for name in saved)
        if fresh:
            accelerator = self._accelerator(case)
            net, optimizer, loader = self._prepared(accelerator, data, seed=11)
        accelerator.load_state(str(folder / "state"))
        torch.testing.assert_close(self._state(accelerator, net), saved, rtol=0, atol=0)
        train(accelerator, net, optimizer, loader, case, 1, self.loss_of)
        self._close(self._state(accelerator, net), after)

    def _saves_model(self, folder: Path) -> None:
        """`save_model` writes the whole model under the names that the bare model has."""
        accelerator = self._accelerator()
        net = accelerator.prepare(self._model())
        accelerator.save_model(net, folder / "model")
        accelerator.wait_for_everyone()
        bare = self._model(seed=11)
        load_model(bare, folder / "model")
        torch.testing.assert_close(dict(bare.state_dict()), dict(self._model().state_dict()), rtol=0, atol=0)

    def _unwraps(self) -> None:
        """The model inside has its own class and names, whatever was put around it."""
        accelerator = self._accelerator()
        net = accelerator.prepare(self._model())
        bare = accelerator.unwrap_model(net)
        assert isinstance(bare, nn.Sequential)
        assert list(self._state(accelerator, net)) == list(self._model().state_dict())
        assert list(dict(bare.named_modules())) == list(dict(self._model().named_modules()))

    def _prepares_twice(self) -> None:
        """What was prepared comes back as it is."""
        accelerator = self._accelerator()
        prepared = self._prepared(accelerator, self._samples(8))
        assert all(a is b for a, b in zip(accelerator.prepare(*prepared), prepared, strict=True))
        assert (len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)) == (1, 1, 1)

    def _seeds(self) -> None:
        """With device-specific seeds, ranks that compute the same loss draw the same numbers, and all others differ."""
        accelerator = self._accelerator()
        layout = accelerator._runtime.layout
        set_seed(5, device_specific=True)
        drawn = gather_object([(layout.loss_part, torch.initial_seed())])
        assert sorted(set(drawn)) == [(part, 5 + part) for part in range(layout.size(*GROUPS["dp_cp"]))]

    def _reads_once(self, *, dispatch: bool) -> None:
        """Ranks of one replica read the same rows, replicas read all of them, and metrics count each sample once."""
        accelerator = self._accelerator()
        layout = accelerator._runtime.layout
        count = 3 * _BATCH * layout.replicas + 1  # a last global batch that is filled up with repeats
        rows = list(range(count))
        accelerator.dataloader_config.dispatch_batches = dispatch
        data: Any = _Rows(rows) if dispatch else rows
        loader: Any = accelerator.prepare(DataLoader(data, batch_size=_BATCH))
        for _ in range(2):
            own: list[list[int]] = []
            counted: list[int] = []
            for batch in loader:
                own.append(batch.tolist())
                counted += accelerator.gather_for_metrics(batch).tolist()
            assert sorted(counted) == rows, "metrics count every sample once"
            read: dict[int, list[list[int]]] = {}
            for part, other in gather_object([(layout.part, own)]):
                assert read.setdefault(part, other) == other, "ranks of one replica read the same rows"
            assert {row for part in read.values() for batch in part for row in batch} == set(rows)

    def _refuses(self) -> None:
        """Errors are named, come on every rank, and nothing was prepared."""
        accelerator = self._accelerator()
        net: Any = self._model()
        net.hf_device_map = {"0": "cpu", "2": "disk"}
        with pytest.raises(PreparationError, match="weights on disk"):
            accelerator.prepare(net)
        assert accelerator._models == []

        accelerator, net = self._accelerator(), self._model()
        optimizer = optimizer_of(net)
        accelerator.prepare(net)
        accelerator.unwrap_model(net)[2] = nn.Identity()
        lost = r"group 0: 2\.weight, group 0: 2\.bias" if self.optimizers_follow else "together with its optimizer"
        with pytest.raises(PreparationError, match=lost):
            accelerator.prepare(optimizer)
        assert accelerator._optimizers == []

        accelerator = self._accelerator()
        net, *_ = self._prepared(accelerator, self._samples(_BATCH))
        stray = self._model()(torch.ones(1, _FEATURES, dtype=self.dtype)).sum()
        with pytest.raises(StateError, match=r"no gradient|leads to none"):
            accelerator.backward(stray, weight=1)
        if self.strategy.join is Strategy.join and ensure().size > 1:
            with pytest.raises(PreparationError, match="cannot join"), accelerator.join_uneven_inputs([net]):
                pass
        for refusal in self.refusals():
            accelerator = self._accelerator()
            with pytest.raises(refusal.error, match=refusal.message):
                refusal.act(accelerator)

    def _model(self, seed: int = 3) -> nn.Module:
        return model(seed, self.dtype)

    def _samples(self, count: int) -> TensorDataset:
        return samples(count, self.dtype)

    def _close(self, found: object, expected: object) -> None:
        rtol, atol = (None, None) if self.dtype is torch.double else (1e-5, 1e-6)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)

    def _prepared(self, accelerator: Accelerator, data: TensorDataset, seed: int = 3) -> Any:
        net = self._model(seed)
        return accelerator.prepare(net, optimizer_of(net), DataLoader(data, batch_size=_BATCH))

    def _state(self, accelerator: Accelerator, net: nn.Module) -> dict[str, Any]:
        """Return a copy of the whole model's state, after comparing it with that of every rank."""
        state = {name: value.detach().clone() for name, value in accelerator.get_state_dict(net).items()}
        first, *others = gather_object([state])
        for other in others:
            torch.testing.assert_close(other, first if self.state_everywhere else {}, rtol=0, atol=0)
        return first  # type: ignore[no-any-return]


class _Rows(IterableDataset[Any]):
    """A stream of rows."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def _call(source: str, qualname: str, check: str, folder: Path) -> None:
    """Run one check on a rank, with a strategy that is not an announced engine's known by its name."""
    conformance: StrategyConformance = imported(source, qualname)()
    package = conformance.strategy.__module__.partition(".")[0]
    if all(package != engine.strategy.partition(".")[0] for engine in engines().values()):
        register_strategy(conformance.strategy)
        os.environ["ACCELERATE_STRATEGY"] = conformance.strategy.name
    conformance._checks(folder)[check]()
