"""One scenario on the simulated accelerator, in a process of its own: `python scenario.py NAME FOLDER`."""

import contextlib
import gc
import io
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_bigmodel.hooks.residency import residencies_of
from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, DeviceMapError
from accel_core.host.environ import patch_environment
from accel_core.modules.held_memory import report_oom
from accel_core.modules.sizes import convert_file_size_to_int
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin

LAYER = 64 * 64 * 4 + 64 * 4


class Block(nn.Module):
    """A layer with a residual connection, which has to stay on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the layer's output to its input."""
        return torch.tanh(self.layer(x)) + x


class Stack(nn.Module):
    """Layers of one size between an embedding and a tied head."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(8).reshape(2, 4)


def reference(folder: Path) -> tuple[Stack, Path, torch.Tensor]:
    """Make the model, its checkpoint and its output on the CPU."""
    torch.manual_seed(0)
    model = Stack().eval().requires_grad_(False)
    file = folder / "model.safetensors"
    save_file({name: value for name, value in model.state_dict().items() if name != "head.weight"}, file)
    return model, file, model(TOKENS)


def empty() -> Stack:
    """Make the model without weights."""
    with init_empty_weights():
        return Stack().eval().requires_grad_(False)


def spread(sim: Any, folder: Path) -> None:
    """A map over two devices, CPU and disk gives bit-equal outputs and state within all limits, and writes nothing."""
    plain, file, expected = reference(folder)
    limits: dict[int | str, int | str] = {0: 6 * LAYER, 1: 3 * LAYER, "cpu": 2 * LAYER}
    model = load_checkpoint_and_dispatch(
        empty(), file, device_map="sequential", max_memory=limits, no_split_module_classes=["Block"]
    )
    device_map = model.hf_device_map
    placed = [sim.memory_allocated(0), sim.memory_allocated(1)]
    outputs = [model(TOKENS) for _ in range(3)]
    state = get_state_dict_offloaded_model(model)
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert state["head.weight"] is state["embed.weight"]
    assert {str(device) for device in device_map.values()} == {"0", "1", "cpu", "disk"}
    assert all(torch.equal(output, expected) for output in outputs)
    assert outputs[0].device.type == "cpu"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    for number in (0, 1):
        assert placed[number] <= limits[number]
        # The reserve for the largest offloaded layer covers the peak; activations are a few hundred bytes.
        assert sim.max_memory_allocated(number) <= limits[number] + 16 * 1024


def budget(sim: Any, folder: Path) -> None:
    """All layers on the CPU: the device's peak is the budget and a few activations; after the pass nothing is left."""
    plain, _, expected = reference(folder)
    for layers in (1, 2, 4):
        gc.collect()
        twin = Stack().eval().requires_grad_(False)
        twin.load_state_dict(plain.state_dict())
        before = sim.memory_allocated(0)
        model = cpu_offload(twin, torch.device(simulated.NAME, 0), prefetch=layers * LAYER if layers > 1 else False)
        outputs = [model(TOKENS.to(simulated.NAME)).cpu() for _ in range(2)]
        sim.reset_peak_memory_stats(0)
        outputs.append(model(TOKENS.to(simulated.NAME)).cpu())
        assert all(torch.equal(output, expected) for output in outputs), layers
        assert sim.max_memory_allocated(0) - before <= layers * LAYER + 16 * 1024, layers
        assert sim.memory_allocated(0) == before, layers
        parts = [part for module in model.modules() for part in residencies_of(module) if part.binding is not None]
        assert len({id(part.binding.schedule) for part in parts}) == (layers > 1), layers


def full(sim: Any, folder: Path) -> None:
    """A device too small for the model raises its error; afterwards the model is whole and the device empty."""
    plain, _, expected = reference(folder)
    model = cpu_offload(plain, torch.device(simulated.NAME, 0), prefetch=4 * LAYER)
    model(TOKENS.to(simulated.NAME))
    sim.native.set_limit(sim.memory_allocated(0) + LAYER // 2)
    with pytest.raises(torch.OutOfMemoryError):
        model(TOKENS.to(simulated.NAME))
    sim.native.set_limit(1 << 30)
    assert torch.equal(model(TOKENS.to(simulated.NAME)).cpu(), expected)


def exhausted(sim: Any, folder: Path) -> None:
    """All that a full device has allocated is told: weights, other tensors, and what is kept for backward."""
    device, printed = torch.device(simulated.NAME, 0), io.StringIO()
    model = Stack().to(device)
    loss = model(TOKENS.to(device)).square().sum()
    sys.excepthook = lambda *_: None
    report_oom.__wrapped__(device, 0)
    sim.native.set_limit(sim.memory_allocated(0) + LAYER)
    try:
        torch.empty(2 * LAYER, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as failure:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(failure), failure, failure.__traceback__)
    sim.native.set_limit(1 << 30)
    heading, *lines = printed.getvalue().splitlines()
    assert heading == "Memory ran out on rank 0. What held it:"
    sizes = {line[2:18].strip(): convert_file_size_to_int("".join(line[18:].split()[:2])) for line in lines}
    weights = sum(each.nbytes for each in model.parameters())
    assert sizes["parameters"] == pytest.approx(weights, abs=10)  # KiB with two decimals
    assert sum(sizes.values()) == pytest.approx(sim.memory_allocated(0), abs=10 * len(sizes))
    assert lines[-1].startswith("  no tensor above")
    assert sizes["no tensor above"] > 0
    del loss  # which kept what backward needs until here


def refused(sim: Any, folder: Path) -> None:
    """A block larger than its device is named with bytes needed and given; nothing was moved, and the model runs."""
    plain, file, expected = reference(folder)
    places: dict[str, int | str] = {"embed": 0, "head": 0, "layers": "cpu"}
    sim.native.set_limit(LAYER // 2)
    needed = r"'layers\.0\.layer' of 16\.25 KiB(.|\n)*which has 8\.12 KiB in all"
    with pytest.raises(DeviceMapError, match=needed):
        dispatch_model(plain, places)
    with pytest.raises(DeviceMapError, match=needed):
        load_checkpoint_and_dispatch(empty(), file, device_map=places)
    sim.native.set_limit(1 << 30)
    assert not hasattr(plain, "_hf_hook")
    assert torch.equal(plain(TOKENS), expected)
    assert sim.max_memory_allocated(0) == 0


def tight(sim: Any, folder: Path) -> None:
    """A device with room for little more than one layer: prefetching gives way, and the output is right."""
    plain, _, expected = reference(folder)
    model = cpu_offload(plain, torch.device(simulated.NAME, 0), prefetch=6 * LAYER)
    model(TOKENS.to(simulated.NAME))
    sim.native.set_limit(sim.memory_allocated(0) + int(2.2 * LAYER))
    outputs = [model(TOKENS.to(simulated.NAME)).cpu() for _ in range(3)]
    assert all(torch.equal(output, expected) for output in outputs)


def gradients(sim: Any, folder: Path) -> None:
    """An adapter over an offloaded base trains as it does in memory: staging memory is never used again under grad."""
    plain, _, _ = reference(folder)

    class Adapted(nn.Module):
        def __init__(self, base: Stack) -> None:
            super().__init__()
            self.base = base
            self.adapters = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in base.layers])
            for adapter in self.adapters:
                nn.init.constant_(adapter.weight, 0.01)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.base.embed(tokens)
            for layer, adapter in zip(self.base.layers, self.adapters, strict=True):
                x = layer(x) + adapter(x)
            return self.base.head(x)

    inmemory = Adapted(plain)
    inmemory(TOKENS).square().sum().backward()
    wanted = [adapter.weight.grad.clone() for adapter in inmemory.adapters]
    inmemory.zero_grad()
    cpu_offload(inmemory.base, torch.device(simulated.NAME, 0), prefetch=3 * LAYER)
    device = torch.device(simulated.NAME, 0)
    inmemory.adapters.to(device)
    for _ in range(2):
        inmemory.zero_grad()
        inmemory(TOKENS.to(device)).square().sum().backward()
        for adapter, gradient in zip(inmemory.adapters, wanted, strict=True):
            assert torch.equal(adapter.weight.grad.cpu(), gradient)


def back(sim: Any, folder: Path) -> None:
    """Removing the hooks gives back weights, ties and forward, and the device is empty."""
    plain, _, expected = reference(folder)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    cpu_offload(plain, torch.device(simulated.NAME, 0))
    plain(TOKENS.to(simulated.NAME))
    remove_hook_from_submodules(plain)
    assert torch.equal(plain(TOKENS), expected)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in weights.items())
    assert plain.head.weight is plain.embed.weight
    assert sim.memory_allocated(0) == 0


def mixed(sim: Any, folder: Path) -> None:
    """Arithmetic across devices raises, so that the others prove something; a model over both answers where asked."""
    a, b = torch.ones(2, device=f"{simulated.NAME}:0"), torch.ones(2, device=f"{simulated.NAME}:1")
    for other in (b, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(a, other)
    moved = dispatch_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": 0, "1": 1})
    assert moved(torch.ones(1, 2)).device.type == "cpu"


def prepared(sim: Any, folder: Path) -> None:
    """`prepare` moves a model that was loaded whole on the CPU, and leaves weights on disk where they are."""
    simulated.make_known()
    with patch_environment(ACCELERATE_TORCH_DEVICE=f"{simulated.NAME}:0"):
        accelerator = Accelerator()
    moved = dispatch_model(nn.Linear(2, 2), {"": "cpu"})
    model, optimizer = accelerator.prepare(moved, torch.optim.SGD(moved.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.step()
    _, checkpoint, expected = reference(folder)
    frozen = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map={"embed": 0, "layers": "disk", "head": 0}, offload_folder=folder / "frozen"
    )
    frozen = accelerator.prepare(frozen)
    assert str(model.weight.device) == f"{simulated.NAME}:0"
    assert all(parameter.is_meta for parameter in frozen.layers.parameters())
    assert torch.equal(frozen(TOKENS.to(accelerator.device)).cpu(), expected)


def pinned(sim: Any, folder: Path) -> None:
    """Weights that wait on the CPU are pinned within a budget, in place; the rest comes through a buffer."""
    device = torch.device(simulated.NAME, 0)
    for budget, count in ((None, 12), (4 * 2**14, 3), (0, 0)):
        plain, file, expected = reference(folder)
        places = {"embed": 0, "head": 0, "layers": "cpu"}
        loaded = load_checkpoint_and_dispatch(empty(), file, device_map=places, pinned=budget)
        before = dict(plain.named_parameters())
        offloaded = cpu_offload(plain, device, pinned=budget)
        for model in (offloaded, loaded):
            stored = [each for module in model.modules() for one in residencies_of(module) for each in one.values()]
            assert sum(value.is_pinned() and value.numel() == 64 * 64 for _, value in stored) == count, budget
            assert all(torch.equal(model(TOKENS.to(device)).cpu(), expected) for _ in range(2)), budget
        remove_hook_from_submodules(plain)
        assert all(parameter is before[name] for name, parameter in plain.named_parameters()), budget


def unshared(sim: Any, folder: Path) -> None:
    """FSDP1, which would train other weights than the plain model, is refused to offload what one process holds."""
    simulated.make_known()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, cpu_offload=True)
    reset_all()
    with (
        patch_environment(ACCELERATE_TORCH_DEVICE=f"{simulated.NAME}:0"),
        pytest.raises(ConfigurationError, match=r"got cpu_offload and ShardingStrategy\.FULL_SHARD on 1 processes"),
    ):
        Accelerator(fsdp_plugin=plugin)


class Experts(nn.Module):
    """Eight layers in one stack, of which a token runs through two."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.weight = nn.Parameter(torch.randn(8, 64, 64) / 8)

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum what the chosen experts make of each token."""
        output = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            choice, rows = torch.where((numbers == number).T)
            if len(rows):
                made = tokens[rows] @ self.weight[number]
                output = output.index_add(0, rows, made * weights[rows, choice, None])
        return output


class Mixture(nn.Module):
    """Experts and the router that chooses two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 8), Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add what two experts make of each token."""
        weights, numbers = self.router(tokens).softmax(-1).topk(2, -1)
        return tokens + self.experts(tokens, numbers, weights)


def experts(sim: Any, folder: Path) -> None:
    """Chosen experts come to the device bit for bit within the cache; guesses bring no more than they say."""
    torch.manual_seed(0)
    plain, tokens = nn.Sequential(*(Mixture() for _ in range(4))).eval().requires_grad_(False), torch.randn(3, 64)
    expected, one = plain(tokens), 64 * 64 * 4
    save_file(plain.state_dict(), folder / "model.safetensors")
    for away, other in (("disk", "cpu"), ("cpu", "disk")):
        for lookahead in (False, True):
            gc.collect()
            with init_empty_weights():
                model = nn.Sequential(*(Mixture() for _ in range(4))).eval().requires_grad_(False)
            places = {f"{n}.{part}": place for n in range(4) for part, place in (("router", 0), ("experts", away))}
            model = load_checkpoint_and_dispatch(
                model, folder, places, expert_cache=6 * one, expert_lookahead=lookahead
            )
            sim.reset_peak_memory_stats(0)
            before = sim.memory_allocated(0)
            outputs = [model(tokens.to(simulated.NAME)).cpu() for _ in range(3)]
            report = model.expert_report()
            brought = {"disk": report.from_disk // one, "cpu": report.from_host // one}
            assert all(torch.equal(each, expected) for each in outputs)
            # Full, but for the room of wrong guesses that were called off before they were read.
            assert 0 <= 6 * one - report.held <= report.guessed_wrong * one
            assert sim.max_memory_allocated(0) - before - 6 * one < one
            assert brought[other] == 0
            if lookahead:
                assert report.guessed > 0
                assert report.misses < brought[away]
            else:
                assert report.held == 6 * one
                assert brought[away] == report.misses > 0


def main() -> dict[str, Any]:
    """Run the scenarios that are named, each in its own folder, and return what each raised."""
    sim = simulated.set_up()
    results = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        gc.collect()  # what the one before left on the devices would count against the limits of this one
        results[name] = ""
        try:
            globals()[name](sim, folder)
        except BaseException:
            results[name] = traceback.format_exc()
    return results


if __name__ == "__main__":
    simulated.tell(main)
