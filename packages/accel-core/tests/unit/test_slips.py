"""Slips of a beginner: each gets one warning or one named error that says the fix, and nothing raw."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.errors import AccelError, CheckpointError, ConfigurationError, UnsupportedTypeError, expect
from accel_core.options.enums import RNGType
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import TorchTensorParallelConfig
from accel_core.plugins.project import ProjectConfiguration
from accel_core.random import set_seed
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import requires

pytestmark = pytest.mark.usefixtures("fresh_state")


class Net(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


class Silent(GeneralTracker):
    """A tracker that stores nothing."""

    name, requires_logging_directory, tracker = "silent", False, None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store nothing."""


@pytest.mark.parametrize("mode", torch._inductor.list_mode_options())
def test_modes_of_torch_are_taken(mode: str) -> None:
    """What torch.compile knows is not refused, also where Accelerate's documentation does not list it."""
    assert TorchDynamoPlugin(mode=mode).mode == mode


def test_loading_in_inference_mode_is_refused(tmp_path: Path) -> None:
    """Nothing is changed by it; under no_grad the same state is loaded."""
    accelerator = Accelerator(cpu=True)
    net = Net()
    model, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(tmp_path)
    saved = model.layer.weight.detach().clone()
    model.layer.weight.data.zero_()
    with (
        torch.inference_mode(),
        pytest.raises(CheckpointError, match=r"got load_state under torch\.inference_mode\(\)"),
    ):
        accelerator.load_state(tmp_path)
    assert not model.layer.weight.any()
    with torch.no_grad():
        accelerator.load_state(tmp_path)
    assert torch.equal(model.layer.weight, saved)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def _tracked() -> None:
    accelerator = Accelerator(cpu=True, log_with=Silent())
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def _stepped(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    for _ in range(2):
        optimizer.step()
        schedule.step()


def _other_schedule(accelerator: Accelerator) -> None:
    model = Net()
    other = _sgd(model)
    schedule = _schedule(other)
    other.step()  # torch warns by itself of an optimizer that never steps
    _stepped(*accelerator.prepare(model, _sgd(model), schedule)[1:])


def _schedule_alone(accelerator: Accelerator) -> None:
    optimizer = _sgd(Net())
    _stepped(optimizer, accelerator.prepare(_schedule(optimizer)))


Slip = Callable[[Accelerator], object]

REFUSED: list[tuple[str, Slip, type[AccelError], str]] = [
    ("set_seed text", lambda _: set_seed("42"), UnsupportedTypeError, r"got '42' \(str\).*set_seed\(42\)"),  # type: ignore[arg-type]
    ("set_seed None", lambda _: set_seed(None), UnsupportedTypeError, r"got None.*set_seed\(42\)"),  # type: ignore[arg-type]
    ("log_with", lambda _: Accelerator(cpu=True, log_with=3), ConfigurationError, r"No tracker is named 3"),
    ("save_state", lambda a: a.save_state(5), UnsupportedTypeError, r"got 5 \(int\).*path"),
    ("load_state", lambda a: a.load_state(5), UnsupportedTypeError, r"got 5 \(int\).*path"),
    (
        "load_state with another name for the folder",
        lambda a: (a.prepare(Net()), a.load_state(path="x")),
        ConfigurationError,
        r"got path.*input_dir",
    ),
    ("total_limit", lambda _: ProjectConfiguration(total_limit=-1), ConfigurationError, r"total_limit=-1"),
    ("total_limit text", lambda _: ProjectConfiguration(total_limit="2"), ConfigurationError, r"got total_limit='2'"),  # type: ignore[arg-type]
    ("a device first", lambda _: Accelerator("cpu"), UnsupportedTypeError, r"got 'cpu' \(str\).*cpu=True"),  # type: ignore[arg-type]
    (
        "a dict of data settings",
        lambda _: Accelerator(cpu=True, dataloader_config={"split_batches": True}),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"dataloader_config takes a DataLoaderConfiguration; got \{'split_batches'.*DataLoaderConfiguration\(",
    ),
    (
        "a dict as plug-in",
        lambda _: Accelerator(cpu=True, fsdp_plugin={"offload": {"cpu": True}}),  # type: ignore[dict-item]
        UnsupportedTypeError,
        r"fsdp_plugin takes a FullyShardedDataParallelPlugin; got \{'offload'",
    ),
    (
        "an empty dict of data settings",
        lambda _: Accelerator(cpu=True, dataloader_config={}),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"got \{\} \(dict\)",
    ),
    (
        "a class of settings",
        lambda _: Accelerator(cpu=True, project_config=ProjectConfiguration),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"got the class ProjectConfiguration\. Write project_config=ProjectConfiguration\(",
    ),
    (
        "a folder as project",
        lambda _: Accelerator(cpu=True, project_config="out"),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"got 'out' \(str\).*ProjectConfiguration\(",
    ),
    (
        "a flag as text",
        lambda _: Accelerator(cpu=True, split_batches="yes"),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"split_batches.*'yes'",
    ),
    ("cpu as text", lambda _: Accelerator(cpu="no"), UnsupportedTypeError, r"cpu is True or False; got 'no'"),  # type: ignore[arg-type]
    (
        "a flag of loaders",
        lambda _: DataLoaderConfiguration(even_batches="false"),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"even_batches is True or False; got 'false' \(str\)\. Write even_batches=True or even_batches=False\.",
    ),
    (
        "a flag as list",
        lambda _: DataLoaderConfiguration(dispatch_batches=[True]),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"got \[True\]",
    ),
    ("a flag of projects", lambda _: ProjectConfiguration(save_on_each_node=2), UnsupportedTypeError, r"got 2 \(int\)"),  # type: ignore[arg-type]
    (
        "a flag of DDP",
        lambda _: DistributedDataParallelKwargs(find_unused_parameters="no"),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"find_unused_parameters is True or False; got 'no'",
    ),
    ("a flag of tensor parallel", lambda _: TorchTensorParallelConfig("no"), UnsupportedTypeError, r"got 'no'"),  # type: ignore[arg-type]
    ("a mode of the compiler", lambda _: TorchDynamoPlugin(mode="fastest"), ConfigurationError, r"'fastest'.*'lite'"),
    ("a flag of the compiler", lambda _: TorchDynamoPlugin(fullgraph="no"), UnsupportedTypeError, r"got 'no'"),  # type: ignore[arg-type]
    (
        "rng_types",
        lambda _: Accelerator(cpu=True, rng_types=["numpy"]),
        ConfigurationError,
        r"'numpy'.*torch.*set_seed\(",
    ),
    (
        "metrics of two",
        lambda a: a.gather_for_metrics(torch.ones(1), torch.ones(1)),
        UnsupportedTypeError,
        r"takes one nest; got a Tensor\. Write gather_for_metrics\(\(",
    ),
    (
        "one handler",
        lambda _: Accelerator(cpu=True, kwargs_handlers=DistributedDataParallelKwargs()),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"kwargs_handlers is a list; got a Dist.*Write \[DistributedDataParallelKwargs\(\.\.\.\)\]",
    ),
    ("a list as configuration", lambda a: a.init_trackers("x", [1]), UnsupportedTypeError, r"config maps.*got \[1\]"),  # type: ignore[arg-type]
    ("unwrapping a name", lambda a: a.unwrap_model("x"), UnsupportedTypeError, r"torch\.nn\.Module; got 'x' \(str\)"),  # type: ignore[arg-type]
    (
        "saving a state dict",
        lambda a: a.save_model(Net().state_dict(), "out"),  # type: ignore[arg-type]
        UnsupportedTypeError,
        r"got an OrderedDict\. Pass the model itself",
    ),
    (
        "a compiler with a slip",
        lambda _: Accelerator(cpu=True, dynamo_backend="inductr"),
        ConfigurationError,
        r"got 'inductr'\. Did you mean 'inductor'\? Use one of \['no', (?!.*nvfuser)",
    ),
    ("reduce a number", lambda a: a.reduce(1.0), UnsupportedTypeError, r"`reduce` works on tensors"),
    ("pad a number", lambda a: a.pad_across_processes(1.0), UnsupportedTypeError, r"`pad_across_processes` works on"),
]


NEEDS = {"a dict as plug-in": requires("engine:fsdp")}


def _tracked_vector() -> None:
    accelerator = Accelerator(cpu=True, log_with=Silent())
    accelerator.init_trackers("project")
    for _ in range(2):
        accelerator.log({"loss": torch.ones(3), "one": torch.ones(1), "mean": torch.ones(())})
    accelerator.end_training()


def _trained(
    accelerator: Accelerator, backward: Callable[[torch.Tensor], None] | None = None, *, batches: int = 1
) -> Callable[[], None]:
    """Train one step without accumulate(), and return what trains another one."""
    model, optimizer = accelerator.prepare(model := Net(), _sgd(model))

    def step() -> None:
        for _ in range(batches):
            (backward or accelerator.backward)(model.layer(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def _accumulated(backward: Callable[[Accelerator, torch.Tensor], None]) -> None:
    """Train twice as long as a window is, in blocks of accumulate()."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model := Net(), _sgd(model))
    for _ in range(4):
        with accelerator.accumulate(model):
            backward(accelerator, model.layer(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()


WARNED: list[tuple[str, Slip, str]] = [
    ("a schedule of another optimizer", _other_schedule, r"StepLR.*not prepared \(SGD\).*prepare\(\)"),
    ("a schedule alone", _schedule_alone, r"StepLR.*not prepared \(SGD\)"),
    (
        "no accumulate()",
        lambda _: _trained(Accelerator(gradient_accumulation_steps=4))(),
        r"divides each loss by 4; got",
    ),
    ("backward of the loss", lambda a: _trained(a, torch.Tensor.backward)(), r"gradients of loss\.backward\(\)"),
    (
        "backward of a loss in a window",
        lambda _: _accumulated(lambda _, loss: loss.backward()),
        r"divides the loss of a",
    ),  # type: ignore[no-untyped-call]
    ("logging a vector", lambda _: _tracked_vector(), r"got several values as 'loss'\. Log their mean"),
    ("logging before init_trackers", lambda _: _tracked(), r"before init_trackers"),
]


def _heard(slip: Slip, caplog: pytest.LogCaptureFixture) -> list[str]:
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        slip(accelerator)
    return [*(str(each.message) for each in warned), *(record.getMessage() for record in caplog.records)]


@pytest.mark.parametrize(
    ("slip", "error", "says"),
    [pytest.param(*row[1:], id=row[0], marks=NEEDS.get(row[0], ())) for row in REFUSED],
)
def test_a_slip_is_refused_by_name(slip: Slip, error: type[AccelError], says: str) -> None:
    """What cannot work raises accel's error, alone, with what was found and what to write instead."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(error) as caught:
        slip(accelerator)
    assert re.search(says, str(caught.value))
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(("slip", "says"), [row[1:] for row in WARNED], ids=[row[0] for row in WARNED])
def test_a_slip_that_passes_in_accelerate_is_warned_of_once(
    slip: Slip, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes back unchanged, or trains nothing, gives one warning with the fix."""
    heard = _heard(slip, caplog)
    assert len(heard) == 1, heard
    assert re.search(says, heard[0])


def _schedule_first(accelerator: Accelerator) -> None:
    optimizer = _sgd(Net())
    schedule = accelerator.prepare(_schedule(optimizer))
    _stepped(accelerator.prepare(optimizer), schedule)


class _Around(torch.optim.Optimizer):
    """An optimizer around another, as libraries of optimizers have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups, self.defaults = inner, inner.state, inner.param_groups, {}

    def step(self, closure: Any = None) -> Any:
        """Step the other."""
        return self.inner.step(closure)


def _schedule_inside(accelerator: Accelerator) -> None:
    inner = _sgd(Net())
    _stepped(*accelerator.prepare(_Around(inner), _schedule(inner)))


def _own_schedule(accelerator: Accelerator) -> None:
    """A loop in which the user steps both the optimizer and its schedule."""
    optimizer = _sgd(Net())
    free = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    _stepped(optimizer, free.prepare(_schedule(optimizer)))


def _flags(accelerator: Accelerator) -> None:
    Accelerator(cpu=1, split_batches=None, device_placement=torch.tensor(True))  # type: ignore[arg-type]
    DataLoaderConfiguration(split_batches=0, use_seedable_sampler=None)  # type: ignore[arg-type]


RIGHT: list[tuple[str, Slip]] = [
    ("a schedule before its optimizer", _schedule_first),
    ("a schedule after its optimizer", lambda a: _stepped(o := a.prepare(_sgd(Net())), a.prepare(_schedule(o)))),
    ("a schedule of the optimizer in a wrapper", _schedule_inside),
    ("a schedule that is stepped by hand", _own_schedule),
    ("flags of other types", _flags),
    ("generators of devices", lambda a: Accelerator(cpu=True, rng_types=["torch", "cuda", RNGType.XPU, "generator"])),
    ("accumulating", lambda a: [a.accumulate().__enter__(), a.accumulate(Net(), Net()).__enter__()]),
    ("other objects", lambda a: a.prepare(None, 3, "x", [1, 2], {"rate": 0.1}, [torch.ones(2)])),
    ("a loader", lambda a: a.prepare(DataLoader(range(3)))),
    ("logging without trackers", lambda a: a.log({"loss": 1.0})),
    ("accumulating in blocks", lambda _: _accumulated(Accelerator.backward)),
    ("accumulating by hand", lambda _: _trained(Accelerator(cpu=True, gradient_accumulation_steps=4), batches=4)()),
    ("a step without gradients", lambda a: a.prepare(_sgd(Net())).step()),
    ("gathering a nest", lambda a: a.gather({"loss": [torch.ones(1), (torch.ones(2),)]})),
    ("an evaluated model", lambda a: a.prepare(Net(), DataLoader(range(3)))),
    ("a step beside its model", lambda a: a.clip_grad_norm_(_with_gradients(Net()).parameters(), 0)),
]


@pytest.mark.parametrize("use", [row[1] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_right_use_is_not_warned_of(use: Slip, caplog: pytest.LogCaptureFixture) -> None:
    """Uses that look like slips and are none pass without a word."""
    assert _heard(use, caplog) == []


def test_a_flag_of_numpy_is_a_flag() -> None:
    """What a comparison of arrays gives counts as true or false."""
    numpy = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    assert Accelerator(cpu=numpy.True_, split_batches=numpy.arange(2)[1] == 1).split_batches
    with pytest.raises(UnsupportedTypeError, match="even_batches is True or False"):
        DataLoaderConfiguration(even_batches=numpy.ones(2) == 1)


def test_errors_of_torch_in_backward_pass_through() -> None:
    """A tensor that torch refuses to differentiate keeps torch's error."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        Accelerator(cpu=True).backward(torch.ones(()))


def test_a_path_object_is_a_folder(tmp_path: Path) -> None:
    """A `Path` is taken for a folder as a text is."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.load_state(accelerator.save_state(tmp_path / "saved")).missing == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("x", "'x' (str)"), (None, "None"), (Net, "the class Net"), ([1], "[1] (list)"), ("y" * 99, "a str")],
)
def test_what_was_found_is_shown(value: object, shown: str) -> None:
    """An unexpected value is shown by its text where that is short, else by its type."""
    with pytest.raises(UnsupportedTypeError) as caught:
        expect(False, value, "A number is needed", "Pass one.")
    assert str(caught.value) == f"A number is needed; got {shown}. Pass one."
