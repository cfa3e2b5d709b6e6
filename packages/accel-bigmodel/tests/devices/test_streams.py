"""Weights that travel while a GPU lags behind the program, and models that several streams compute with."""

import contextlib
import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch_model,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks.hook import ModelHook
from accel_testing import limits

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 2048, 10
LAYER = 4 * WIDTH * (WIDTH + 1)
"""Bytes of one layer."""


def stack(width: int = WIDTH) -> nn.Sequential:
    """Make layers on the CPU, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).eval().requires_grad_(False)


def inputs(rows: int = 8, width: int = WIDTH) -> torch.Tensor:
    """Make an input on the device."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)


class Busy:
    """Products that keep the device busy for longer than the program takes for a pass, in memory of their own."""

    def __init__(self, side: int = 4096) -> None:
        self.factor = torch.eye(side, device=DEVICE)
        self.product = torch.empty_like(self.factor)
        self()
        torch.cuda.synchronize()

    def __call__(self, times: int = 20) -> None:
        """Queue them on the current stream."""
        for _ in range(times):
            torch.mm(self.factor, self.factor, out=self.product)


def spoil(count: int = 3) -> None:
    """Fill memory of the current stream that is free, or that the allocator takes for free."""
    for _ in range(count):
        torch.full((WIDTH, WIDTH), float("nan"), device=DEVICE)


def _on_cpu(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    return cpu_offload(model, DEVICE, **settings)


def _pinned(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    state = {name: value.pin_memory() for name, value in model.state_dict().items()}
    return cpu_offload(model, DEVICE, state_dict=state, **settings)


def _on_disk(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    return disk_offload(model, folder, DEVICE, **settings)


Offload = Callable[..., nn.Module]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("own", [False, True], ids=["current stream", "own stream"])
@pytest.mark.parametrize(
    ("offload", "settings"),
    [
        (_on_cpu, {}),
        (_on_cpu, {"prefetch": 2 * LAYER}),
        (_on_cpu, {"prefetch": False}),
        (_on_cpu, {"offload_buffers": True}),
        (_pinned, {}),
        (_on_disk, {}),
    ],
)
@torch.no_grad()
def test_passes_are_exact(offload: Offload, settings: dict[str, Any], own: bool, busy: bool, tmp_path: Path) -> None:
    """Passes that follow each other without waiting compute with their own weights, whole and not yet overwritten."""
    model, x = stack(), inputs()
    twin = copy.deepcopy(model).to(DEVICE)
    expected = twin(x)
    model = offload(model, tmp_path / "weights", **settings)
    work = Busy()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if own else contextlib.nullcontext():
        outputs = []
        for _ in range(5):
            if busy:
                work()
            outputs.append(model(x))
            spoil()
    torch.cuda.synchronize()
    assert [torch.equal(output, expected) for output in outputs] == [True] * 5


@torch.no_grad()
def test_the_window_holds_on_a_device_that_lags_behind() -> None:
    """Memory that queued kernels will still read counts: no copy begins before there is room in the window."""
    model, x, work = stack(), inputs(), Busy()

    def peak(run: nn.Module) -> int:
        run(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats(DEVICE)
        work()
        run(x)
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"]) - before

    extra = peak(copy.deepcopy(model).to(DEVICE))
    model = cpu_offload(model, DEVICE, prefetch=3 * LAYER)
    assert max(peak(model) for _ in range(3)) <= 3 * LAYER + extra + LAYER // 2


class Tied(nn.Module):
    """A layer that computes with its weight's copy on another stream, through a module tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner.weight = self.weight
        self.side: torch.cuda.Stream | None = None
        self.work: Busy | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the inner layer on a stream of its own."""
        if self.side is None:
            return self.inner(x) + self.weight.sum()
        total = self.weight.sum()
        self.side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(self.side):
            assert self.work is not None
            self.work()
            return self.inner(x) + total


@torch.no_grad()
def test_a_tied_copy_outlives_the_stream_that_loaded_it() -> None:
    """Its memory is not used again while another stream computes with it."""
    torch.manual_seed(0)
    model, x = Tied().eval(), inputs()
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model = dispatch_model(model, {"": "cpu"}, main_device=0, force_hooks=True)
    assert torch.equal(model(x), expected)
    model.side, model.work = torch.cuda.Stream(DEVICE), Busy()
    output = model(x)
    spoil()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("prefetch", [None, False])
def test_threads_with_streams_of_their_own_share_a_model(prefetch: bool | None) -> None:
    """Each thread gets the plain outputs of its input, whichever of them brought the weights."""
    model, xs = stack(), [inputs(rows) for rows in (4, 8, 16)]
    twin = copy.deepcopy(model).to(DEVICE)
    expected = [twin(x) for x in xs]
    model = cpu_offload(model, DEVICE, prefetch=prefetch)
    work = Busy()

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            for number in range(4):
                if number % 2:
                    work(10)
                found.append(model(x))
                spoil(1)
            torch.cuda.current_stream(DEVICE).synchronize()
        return found

    with ThreadPoolExecutor(len(xs)) as pool:
        outputs = [each.result(limits.limit(30)) for each in [pool.submit(run, x) for x in xs]]
    for found, wanted in zip(outputs, expected, strict=True):
        assert all(torch.equal(each, wanted) for each in found)


@torch.no_grad()
def test_two_models_share_their_weights_on_the_cpu() -> None:
    """Passes of both in turns are exact, and neither writes to what they share."""
    first, x = stack(), inputs()
    state = {name: value.clone() for name, value in first.state_dict().items()}
    twin = copy.deepcopy(first).to(DEVICE)
    second = copy.deepcopy(first)
    models = [cpu_offload(each, DEVICE, state_dict=state) for each in (first, second)]
    work, expected = Busy(), twin(x)
    outputs = []
    for _ in range(3):
        work()
        outputs += [model(x) for model in models]
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)
    assert all(torch.equal(value, twin.state_dict()[name].cpu()) for name, value in state.items())


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@torch.no_grad()
def test_without_hooks_weights_are_back_where_they_were(place: str, tmp_path: Path) -> None:
    """Hooks are taken off while the device still computes the last pass: outputs and weights are those of before."""
    model, x = stack().to(place), inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model, work = cpu_offload(model, DEVICE), Busy()
    work()
    output = model(x)
    remove_hook_from_submodules(model)
    spoil()
    assert torch.equal(output, expected)
    for name, value in model.state_dict().items():
        assert value.device == before[name].device
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("prefetch", [None, False])
def test_an_adapter_trains_over_offloaded_layers(prefetch: bool | None) -> None:
    """Gradients that pass through offloaded weights are those of a model on the device, step after step."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = stack(512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x + self.adapter(x))

    def trained(model: nn.Module, work: Busy | None) -> list[torch.Tensor]:
        x, optimizer = inputs(width=512), torch.optim.SGD(model.adapter.parameters(), lr=0.1)
        for _ in range(4):
            if work is not None:
                work(10)
            model(x).square().mean().backward()
            spoil(1)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.adapter.parameters())

    torch.manual_seed(0)
    plain = Adapted().to(DEVICE)
    model = copy.deepcopy(plain)
    cpu_offload(model.base, DEVICE, prefetch=prefetch)
    for ours, theirs in zip(trained(model, Busy()), trained(plain, None), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_a_compiled_model_brings_its_weights() -> None:
    """Compiled parts between the hooks compute what the plain model does."""
    model, x = stack(512), inputs(width=512)
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model = torch.compile(cpu_offload(model, DEVICE), backend="aot_eager")
    try:
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    finally:
        torch._dynamo.reset()


class Greedy(ModelHook):
    """Asks for more memory than there is when a batch is large."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Ask."""
        if len(output) > 8:
            torch.empty(2**50, dtype=torch.uint8, device=output.device)
        return output


@pytest.mark.parametrize("prefetch", [None, False])
@torch.no_grad()
def test_a_pass_that_runs_out_of_memory_leaves_the_model_usable(prefetch: bool | None) -> None:
    """In the middle of a pass: weights are away again, nothing stays on the device, and a smaller batch runs."""
    model, x = stack(), inputs()
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model = cpu_offload(model, DEVICE, prefetch=prefetch)
    add_hook_to_module(model[LAYERS // 2], Greedy(), append=True)
    model(x)
    large = inputs(16)
    before = torch.cuda.memory_allocated(DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        model(large)
    gc.collect()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("room", [LAYER // 2, LAYER + LAYER // 2 + 2**23])
@torch.no_grad()
def test_a_full_device_is_told_or_lived_with(room: int) -> None:
    """Less than a layer raises torch's own error, room for one layer suffices; with more room the model runs again."""
    model, x = stack(), inputs()
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model = cpu_offload(model, DEVICE, prefetch=4 * LAYER)
    model(x)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + room) / total, DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError) if room < LAYER else contextlib.nullcontext():
            assert torch.equal(model(x), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert torch.equal(model(x), expected)
