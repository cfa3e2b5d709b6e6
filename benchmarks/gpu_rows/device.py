"""Checks that the device does what plain PyTorch does on it: rows without a time."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_rows.place import MIB, Figures, Line, NotHere, Place, Row, check

YES: Figures = {"passed": "yes"}


def placement(place: Place) -> Figures:
    """Model and batches come to the device, and outputs are those of the plain model there, bit for bit."""
    accelerator = place.accelerator()
    check(accelerator.device == place.device, f"the Accelerator computes on {place.device}; got {accelerator.device}")
    torch.manual_seed(0)
    model, data = nn.Linear(64, 32), torch.randn(16, 64)
    twin = copy.deepcopy(model).to(place.device)
    loader = DataLoader(TensorDataset(data), batch_size=4)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for number, (batch,) in enumerate(loader):
        check(batch.device == place.device, f"batches are on {place.device}; got {batch.device}")
        plain = twin(data[4 * number : 4 * number + 4].to(place.device))
        check(torch.equal(model(batch), plain), "the prepared model gives the plain model's outputs")
    return YES


def pinned(place: Place) -> Figures:
    """Batches that travel beside a busy device, from pinned memory and without waiting, hold their own values."""
    from accel_core.plugins.loading import DataLoaderConfiguration

    accelerator = place.accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    width, side = place.size(2**18, 2**8), place.size(4096, 32)
    data = torch.arange(64 * width, dtype=torch.float32).view(64, width)
    busy = torch.randn(side, side, device=place.device)
    for workers in (0, place.size(2, 0)):
        plain = DataLoader(TensorDataset(data), batch_size=4, pin_memory=not place.dry, num_workers=workers)
        sums = []
        for (batch,) in accelerator.prepare(plain):
            for _ in range(5):
                busy = torch.tanh(busy @ busy)
            sums.append(batch.double().sum())
            del batch
        expected = data.view(16, -1).double().sum(1)
        check(torch.equal(torch.stack(sums).cpu(), expected), f"every batch has its sum, with {workers} workers")
    return YES


def autocast(place: Place) -> Figures:
    """A model prepared for bf16 gives what `torch.autocast` by hand gives, as float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    twin = copy.deepcopy(model).to(place.device)
    model = place.accelerator(mixed_precision="bf16").prepare(model)
    x = torch.randn(4, 64, device=place.device)
    with torch.autocast(place.device.type, torch.bfloat16):
        plain = twin(x)
    output = model(x)
    check(plain.dtype == torch.bfloat16 and output.dtype == torch.float32, f"outputs are float32; got {output.dtype}")
    check(torch.equal(output, plain.float()), "outputs are those of torch.autocast by hand")
    return YES


def scaler(place: Place) -> Figures:
    """Six fp16 steps, one of which overflows, end with the weights and the scale of a GradScaler by hand."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    twin = copy.deepcopy(model).to(place.device)
    hand, plain = torch.amp.GradScaler(place.device.type), torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator = place.accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        x, factor = torch.randn(8, 16, device=place.device), 1e38 if step == 2 else 1.0
        with torch.autocast(place.device.type, torch.float16):
            output = twin(x)
        hand.scale(output.float().square().mean() * factor).backward()
        hand.step(plain)
        hand.update()
        plain.zero_grad()
        accelerator.backward(model(x).square().mean() * factor)
        optimizer.step()
        skipped = accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        check(skipped == (step == 2), f"step 2 alone is skipped; got {skipped} at step {step}")
    check(accelerator.scaler.get_scale() == hand.get_scale(), "the scale is that of the GradScaler by hand")
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        check(torch.equal(ours, theirs), "weights are those of the GradScaler by hand")
    return YES


def compiled(place: Place) -> Figures:
    """A compiled model's outputs and gradients are close to the plain model's."""
    from torch._dynamo.utils import counters

    backend = "aot_eager" if place.dry else "inductor"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    twin = copy.deepcopy(model).to(place.device)
    accelerator = place.accelerator(dynamo_backend=backend)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 64, device=place.device)
    output, plain = model(x), twin(x)
    torch.testing.assert_close(output, plain)
    accelerator.backward(output.square().sum())
    plain.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    check(graphs > 0, f"torch compiled a graph; got {graphs}")
    return {"passed": f"yes, by {backend}"}


def rng(place: Place) -> Figures:
    """The device's generator repeats after `set_seed`, and goes on after `load_state` as it did after `save_state`."""
    from accel_core.random import set_seed

    def draw() -> torch.Tensor:
        return torch.rand(64, device=place.device).cpu()

    accelerator = place.accelerator()
    set_seed(1)
    first = draw()
    accelerator.save_state(str(place.folder / "state"))
    after = draw()
    set_seed(1)
    check(torch.equal(draw(), first), "the same seed gives the same numbers")
    draw()
    accelerator.load_state(str(place.folder / "state"))
    check(torch.equal(draw(), after), "the loaded generator goes on where it was saved")
    return YES


def group(place: Place) -> Figures:
    """A process group of one rank, joined by accel, moves tensors of the device."""
    import torch.distributed as dist

    from accel_core.comm.collectives import broadcast, gather, reduce
    from accel_core.process import world

    joined = world.ensure(needs=world.GroupNeeds(alone=True))
    backend = str(dist.get_backend())
    check(place.dry or backend == "nccl", f"the group's backend is nccl; got {backend}")
    x = torch.arange(1024.0, device=joined.device)
    summed, gathered = x.clone(), torch.zeros_like(x)
    dist.all_reduce(summed)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x)
    for what, found in {"all_reduce": summed, "all_gather": gathered, "gather": gather(x),
                        "reduce": reduce(x, "sum"), "broadcast": broadcast(x)}.items():  # fmt: skip
        check(found.device == x.device and torch.equal(found, x), f"{what} over one rank gives the tensor itself")
    world.destroy()
    return {"passed": f"yes, by {backend}"}


def memory(place: Place) -> Figures:
    """`get_max_memory` gives what the device has free, and `release_memory` gives back what a tensor held."""
    from accel_bigmodel import get_max_memory
    from accel_core.devices.memory import clear_device_cache, release_memory

    free, total = place.module.mem_get_info(place.device)
    given = get_max_memory()[0]
    check(0 < given <= total, f"the device is given with at most its {total} bytes; got {given}")
    check(abs(given - free) <= total // 50, f"that is what is free, {free} bytes; got {given}")
    before = place.used()
    tensor = torch.empty(place.size(256 * MIB, MIB), dtype=torch.uint8, device=place.device)
    held = place.used() - before
    check(held >= tensor.nbytes, f"the tensor takes its {tensor.nbytes} bytes; got {held}")
    (tensor,) = release_memory(tensor)
    check(place.used() == before, f"afterwards it holds {before} bytes; got {place.used()}")
    if hasattr(place.module, "memory_reserved"):
        clear_device_cache()  # `release_memory` cannot, as this function still had the tensor while it ran
        reserved = place.module.memory_reserved(place.device)
        check(reserved < held + before, f"the allocator gave its cache back; got {reserved} bytes")
    return YES


def out_of_memory(place: Place) -> Figures:
    """`find_executable_batch_size` goes down from a size that does not fit, on the device's own error."""
    from accel_core.devices.memory import find_executable_batch_size

    room, unit = place.size(1024 * MIB, 8 * MIB), place.size(32 * MIB, MIB // 4)
    place.limit(place.used() + room)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def fill(batch_size: int) -> int:
        tried.append(batch_size)
        return torch.empty(batch_size * unit, dtype=torch.uint8, device=place.device).nbytes

    filled = fill()
    expected = [64]
    while expected[-1] * unit > room:
        expected.append(int(expected[-1] * 0.9))
    check(tried[: len(expected)] == expected, f"sizes go down by a tenth to {expected[-1]}; got {tried}")
    # An allocator takes memory in blocks, so the first size that fits by its bytes may need one more turn.
    check(len(tried) <= len(expected) + 1, f"the first size that fits is taken; got {tried}")
    check(0 < filled <= room, f"what ran fits into {room} bytes; got {filled}")
    return {"passed": f"yes, {len(tried) - 1} times retried"}


def without_torchao(place: Place) -> None:
    """Say that fp8 cannot be had where torchao or the hardware lacks it."""
    import importlib.util

    if importlib.util.find_spec("torchao") is None:
        raise NotHere("torchao is not installed")
    if place.device.type == "cuda" and torch.cuda.get_device_capability(place.device) < (8, 9):
        raise NotHere("this GPU has no fp8; Ada and Hopper have")


def _checked(words: str) -> tuple[Line, ...]:
    return (Line(words, "passed", reach="yes"),)


ROWS = (
    Row(placement, _checked("placement: model, batches and outputs on the device, equal to the plain model's")),
    Row(pinned, _checked("pinned batches, non-blocking beside a busy device, hold their own values")),
    Row(autocast, _checked("bf16: outputs are those of `torch.autocast` by hand, as float32"), dry="cpu"),
    Row(scaler, _checked("fp16: weights, scale and skipped step are those of a `GradScaler` by hand"), dry="cpu"),
    Row(compiled, _checked("compiled model: outputs and gradients close to the plain model's"), 90, dry="cpu"),
    Row(rng, _checked("generator of the device: seeded, saved and loaded")),
    Row(group, _checked("process group of one rank moves the device's tensors")),
    Row(memory, _checked("memory figures: what is free, and what `release_memory` gives back")),
    Row(out_of_memory, _checked("out of memory: the batch size goes down until it fits")),
)
