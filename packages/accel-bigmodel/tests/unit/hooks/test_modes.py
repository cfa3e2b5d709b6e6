"""Every way of keeping weights away, crossed with every mode a model is run in, computes what the plain model does."""

import contextlib
import copy
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_core.errors import OffloadError
from accel_testing import limits

CPU = torch.device("cpu")
TOKENS = torch.arange(7).reshape(1, 7)


class Branch(nn.Module):
    """A forward of its own over a `Sequential`, scaled by a bare parameter, that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.rand(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the scaled layers to the input."""
        inner = self.layers(x)
        if self.fails:
            raise KeyError("in the middle")
        return x + inner * self.scale


class Net(nn.Module):
    """Branches in a `ModuleList` between an embedding and a head that are tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.branches = nn.ModuleList([Branch(), Branch()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(4))

    def forward(self, tokens: torch.Tensor, adapter: torch.Tensor | None = None) -> torch.Tensor:
        """Score every token, with an adapter added after the embedding."""
        x = self.embed(tokens) + self.shift
        if adapter is not None:
            x = x + adapter
        for branch in self.branches:
            x = branch(x)
        return self.head(x)


def _spread(model: nn.Module, folder: Path) -> nn.Module:
    places = {"embed": "cpu", "head": "cpu", "shift": "cpu", "branches.0": "disk", "branches.1": "cpu"}
    return dispatch_model(model, places, offload_dir=folder)


def _loaded(model: nn.Module, folder: Path) -> nn.Module:
    folder.mkdir(exist_ok=True)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    with init_empty_weights():
        empty = Net()
    return load_checkpoint_and_dispatch(empty, folder, device_map={"": "disk"})


def _cast(model: nn.Module, folder: Path) -> nn.Module:
    attach_layerwise_casting_hooks(model, torch.float32, torch.float32)
    return model


PLACEMENTS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, CPU),
    "cpu, ahead": lambda model, folder: cpu_offload(model, CPU, prefetch=True),
    "cpu, with buffers": lambda model, folder: cpu_offload(model, CPU, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder, CPU, prefetch=False),
    "disk, ahead": lambda model, folder: disk_offload(model, folder, CPU),
    "disk, ahead in little room": lambda model, folder: disk_offload(model, folder, CPU, prefetch=200),
    "disk, with buffers": lambda model, folder: disk_offload(model, folder, CPU, offload_buffers=True),
    "branches in one piece": lambda model, folder: disk_offload(model, folder, CPU, preload_module_classes=["Branch"]),
    "map": _spread,
    "map to disk": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "checkpoint": _loaded,
    "whole model with hook": lambda model, folder: cpu_offload_with_hook(model, CPU)[0],
    "layerwise casting": _cast,
}


def _call(model: nn.Module) -> list[torch.Tensor]:
    return [model(TOKENS).detach() for _ in range(2)]


def _under(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> Callable[[nn.Module], list[torch.Tensor]]:
    def run(model: nn.Module) -> list[torch.Tensor]:
        with mode():
            return [output.clone() for output in _call(model)]

    return run


def _first_without_then_with_gradients(model: nn.Module) -> list[torch.Tensor]:
    with torch.inference_mode():
        first = model(TOKENS).clone()
    model.requires_grad_(False)
    adapter = torch.zeros(4, requires_grad=True)
    model(TOKENS, adapter).square().sum().backward()
    assert adapter.grad is not None
    return [first, adapter.grad, *_call(model)]


def _compiled(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        try:
            return _call(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
        finally:
            torch._dynamo.reset()


def _frozen(model: nn.Module) -> list[torch.Tensor]:
    before = _call(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapter = torch.zeros(4, requires_grad=True)
    gradients = []
    for _ in range(2):
        (gradient,) = torch.autograd.grad(model(TOKENS, adapter).square().sum(), [adapter])
        gradients.append(gradient)
    return [*before, *gradients]


def _after_failures(model: nn.Module) -> list[torch.Tensor]:
    branches = [module for module in model.modules() if type(module).__name__ == "Branch"]
    for branch in branches:
        for mode in (torch.inference_mode, torch.enable_grad):
            branch.fails = True  # type: ignore[assignment]
            with mode(), pytest.raises(KeyError, match="in the middle"):
                model(TOKENS)
            branch.fails = False  # type: ignore[assignment]
            _call(model)
    with pytest.raises(RuntimeError):
        model(TOKENS.float())
    return _call(model)


def _in_threads(model: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    failures: list[Exception] = []
    together = threading.Barrier(6)

    def work(number: int) -> None:
        together.wait()
        try:
            for _ in range(25):
                with torch.inference_mode(number % 2 == 0):
                    found.append(model(TOKENS).clone())
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures, failures[0]
    return [output.detach() for output in found]


def _copied(model: nn.Module) -> list[torch.Tensor]:
    _call(model)
    twin = copy.deepcopy(model)
    return [*_call(twin), *_call(model)]


def _called_in_parts(model: nn.Module) -> list[torch.Tensor]:
    x = torch.ones(1, 7, 4)
    return [module(x).detach() for name, module in model.named_modules() if name in ("branches.0", "branches.1.layers")]


def _functional(model: nn.Module) -> list[torch.Tensor]:
    given = {"branches.0.scale": torch.full((4,), 3.0), "branches.1.layers.0.weight": torch.ones(8, 4)}
    return [torch.func.functional_call(model, given, (TOKENS,)).detach(), *_call(model)]


def _narrowed(model: nn.Module) -> list[torch.Tensor]:
    before = _call(model)
    model.branches.to(torch.bfloat16)  # type: ignore[union-attr]
    x = torch.ones(1, 7, 4, dtype=torch.bfloat16)
    return [*before, *(branch(x).detach() for branch in model.branches)]  # type: ignore[union-attr]


MODES: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "plain": _call,
    "no_grad": _under(torch.no_grad),
    "inference_mode": _under(torch.inference_mode),
    "inference_mode, then gradients": _first_without_then_with_gradients,
    "autocast": _under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast in inference_mode": _under(lambda: _both(torch.inference_mode(), torch.autocast("cpu", torch.bfloat16))),
    "meta by default": _under(lambda: torch.device("meta")),
    "compile": _compiled,
    "frozen after dispatch": _frozen,
    "after failures": _after_failures,
    "threads": _in_threads,
    "deepcopy": _copied,
    "parts alone": _called_in_parts,
    "functional_call": _functional,
    "narrowed after dispatch": _narrowed,
}


@contextlib.contextmanager
def _both(*contexts: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# What has no meaning: storage dtypes are the hook's own, and parts of a block that stays in one piece are not called.
SENSELESS = {("narrowed after dispatch", "layerwise casting"), ("parts alone", "branches in one piece")}
# Compiling takes seconds: these placements have hooks of the same kinds as others that are compiled.
COSTLY = {
    ("compile", placement)
    for placement in ("cpu, ahead", "cpu, with buffers", "disk", "disk, ahead in little room", "map", "map to disk")
}
FULL = pytest.mark.full("compiled once more")
CASES = [
    pytest.param(m, p, marks=[FULL] if m == "compile" and p not in ("cpu", "disk, ahead") else [])
    for m in MODES
    for p in PLACEMENTS
    if (m, p) not in SENSELESS | COSTLY
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "placement"), CASES)
def test_a_placed_model_equals_the_plain_one_in_each_mode(mode: str, placement: str, tmp_path: Path) -> None:
    """Outputs, and gradients to an adapter, are those of the plain model bit for bit; so is a call afterwards."""
    torch.manual_seed(0)
    plain = Net()
    placed = PLACEMENTS[placement](copy.deepcopy(plain), tmp_path / "offload")
    expected = MODES[mode](plain)
    found = MODES[mode](placed)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), number
    if mode != "narrowed after dispatch":
        assert torch.equal(placed(TOKENS), plain(TOKENS))
    remove_hook_from_submodules(placed)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_made_in_inference_mode_stay_usable(placement: str, tmp_path: Path) -> None:
    """A model that is placed inside `inference_mode` takes part in a backward pass outside of it."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    with torch.inference_mode():
        placed = PLACEMENTS[placement](model, tmp_path / "offload")
        placed(TOKENS)
    for one in (placed.requires_grad_(False), plain.requires_grad_(False)):
        adapter = torch.zeros(4, requires_grad=True)
        one(TOKENS, adapter).square().sum().backward()
        one.found = adapter.grad
    assert torch.equal(placed.found, plain.found)


LOAD = """
import pickle, sys, torch
tokens = torch.arange(7).reshape(1, 7)
with open(sys.argv[1], "rb") as file:
    models = pickle.load(file)
outputs = {}
for placement, model in models.items():
    first = model(tokens)
    with torch.inference_mode():
        assert torch.equal(model(tokens), first), placement
    outputs[placement] = first.detach()
torch.save(outputs, sys.argv[2])
"""


@pytest.mark.slow
def test_pickled_models_compute_the_same_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers without a forward of their own, ties, files and memory: loaded elsewhere, all are there."""
    torch.manual_seed(0)
    (tmp_path / "pickled_net.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("pickled_net")
    try:
        plain = net.Net()
        models = {
            name: place(copy.deepcopy(plain), tmp_path / f"offload {number}")
            for number, (name, place) in enumerate(net.PLACEMENTS.items())
        }
        for model in models.values():
            model(TOKENS)
        (tmp_path / "models.pickle").write_bytes(pickle.dumps(models))
    finally:
        del sys.modules["pickled_net"]
    command = [sys.executable, "-c", LOAD, str(tmp_path / "models.pickle"), str(tmp_path / "outputs.pt")]
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    limits.run(command, env={**os.environ, "PYTHONPATH": path}, quiet=30, check=True)
    outputs = torch.load(tmp_path / "outputs.pt")
    assert set(outputs) == set(PLACEMENTS)
    for placement, output in outputs.items():
        assert torch.equal(output, plain(TOKENS)), placement


@pytest.mark.parametrize("placement", ["cpu", "disk", "disk, ahead", "map", "map to disk", "checkpoint"])
def test_a_gradient_for_a_weight_is_refused_until_it_is_frozen(placement: str, tmp_path: Path) -> None:
    """The flag counts as it is when the block runs: refused, frozen and passed through, and refused again."""
    placed = PLACEMENTS[placement](Net(), tmp_path / "offload")
    adapter = torch.zeros(4, requires_grad=True)
    for trains in (True, False, True):
        placed.requires_grad_(trains)
        away = placed.branches[0].layers[0].weight  # type: ignore[index, union-attr]
        assert away.requires_grad is trains
        total = placed(TOKENS, adapter).sum()
        if trains:
            with pytest.raises(OffloadError, match="A gradient reached an offloaded weight"):
                total.backward()
        else:
            total.backward()
    assert adapter.grad is not None
