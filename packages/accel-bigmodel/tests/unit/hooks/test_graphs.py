"""Modules with hooks are exported, compiled, traced and wrapped like the modules without."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch_model,
    remove_hook_from_module,
)
from accel_core.host.versions import is_torch_version

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4)


class Net(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Score a batch."""
        out: torch.Tensor = self.two(torch.relu(self.one(x)))
        return out * scale


class Shift(ModelHook):
    """Adds one to the input."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change the first argument."""
        return (args[0] + 1, *args[1:]), kwargs


def _align() -> AlignDevicesHook:
    return AlignDevicesHook("cpu", io_same_device=True)


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "a hook": lambda: add_hook_to_module(Net(), Shift()),
    "a sequence": lambda: add_hook_to_module(Net(), SequentialHook(Shift(), _align())),
    "aligned": lambda: add_hook_to_module(Net(), _align()),
    "dispatched": lambda: dispatch_model(Net(), {"": "cpu"}, force_hooks=True),
    "dispatched by blocks": lambda: dispatch_model(Net(), {"one": "cpu", "two": "cpu"}, force_hooks=True),
}
OFFLOADED: dict[str, Callable[[Path], nn.Module]] = {
    "cpu": lambda folder: cpu_offload(Net(), CPU),
    "cpu, ahead": lambda folder: cpu_offload(Net(), CPU, prefetch=True),
    "disk": lambda folder: disk_offload(Net(), folder, CPU),
    "map": lambda folder: dispatch_model(Net(), {"one": "disk", "two": "cpu"}, offload_dir=folder),
}


@pytest.fixture
def compiler() -> Iterator[None]:
    """Leave no compiled code to later tests."""
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOOKED)
def test_hooks_that_move_no_weights_are_exported(kind: str, compiler: None) -> None:
    """`torch.export.export` takes up what the hook does, and gives the same outputs."""
    model = HOOKED[kind]()
    program = torch.export.export(model, (X,))
    assert torch.equal(program.module()(X), model(X))


@pytest.mark.slow
@pytest.mark.skipif(is_torch_version("<", "2.9"), reason="this torch compiles no hook with fullgraph=True")
@pytest.mark.parametrize("kind", HOOKED)
def test_hooks_that_move_no_weights_compile_whole(kind: str, compiler: None) -> None:
    """`torch.compile(fullgraph=True)` makes one graph, in training too."""
    model = HOOKED[kind]()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(X)
    assert torch.equal(output, model(X))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
    "ignore:`torch.jit.trace(_method)?` is deprecated:FutureWarning",
)
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.parametrize("calls", [0, 2])
def test_offloaded_models_are_traced(kind: str, calls: int, tmp_path: Path) -> None:
    """`torch.jit.trace` records the loaded weights, whether or not forwards ran before, and the model goes on."""
    model = OFFLOADED[kind](tmp_path)
    for _ in range(calls):
        model(X)
    traced: Any = torch.jit.trace(model, (X,))  # type: ignore[no-untyped-call]
    for x in (X, X - 1):
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("kind", [*HOOKED, *OFFLOADED])
def test_the_forward_shows_the_texts_of_the_module(kind: str, tmp_path: Path) -> None:
    """Name, docstring, module and signature are those of the class's forward, also through `functools.wraps`."""
    model = HOOKED[kind]() if kind in HOOKED else OFFLOADED[kind](tmp_path)
    hooked: Any = model.forward

    @functools.wraps(hooked)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hooked(*args, **kwargs) * 2

    for forward in (hooked, wrapped):
        for text in ("__name__", "__qualname__", "__doc__", "__module__"):
            assert getattr(forward, text) == getattr(Net.forward, text)
        assert inspect.signature(forward) == inspect.signature(Net().forward)
    expected = model(X) * 2
    model.forward = wrapped
    assert torch.equal(model(X), expected)
    plain = remove_hook_from_module(model, recurse=True)
    assert torch.equal(plain(X), Net()(X) * 2)
