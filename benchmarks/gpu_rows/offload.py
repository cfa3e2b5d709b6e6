"""Models whose weights wait in the host's memory or on disk: bytes per second, memory, and equal outputs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
from torch import nn

from gpu_rows.place import GIB, MIB, Differs, Figures, Line, NotHere, Place, Row, check


def stack(width: int, layers: int) -> nn.Sequential:
    """Make linear layers in bf16 without weights."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)])


def filled(place: Place, model: nn.Module) -> nn.Module:
    """Give a model random weights on the host, made on the device because that is faster."""
    generator = torch.Generator(device=place.device if place.device.type == "cuda" else "cpu").manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = torch.empty(module.weight.shape, dtype=torch.bfloat16, device=generator.device)
            weight.normal_(std=module.in_features**-0.5, generator=generator)
            module.weight = nn.Parameter(weight.cpu(), requires_grad=False)
    return model.eval()


def nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


def by_hand(place: Place, model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Run layer after layer, each weight copied to the device for it alone."""
    for layer in model:
        x = nn.functional.linear(x, layer.weight.to(place.device))
    return x


def _model(place: Place) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Make a model of 3 GiB, an input and its output by hand."""
    width = place.size(8192, 64)
    model = filled(place, stack(width, place.size(24, 6)))
    x = torch.randn(place.size(16, 2), width, device=place.device, dtype=torch.bfloat16)
    return model, x, by_hand(place, model, x)


@torch.no_grad()
def cpu_offload(place: Place) -> Figures:
    """Forward of a model whose weights wait on the CPU, by default, beside copies of pinned memory."""
    model, x, expected = _model(place)
    size, rate = nbytes(model), place.pinned_rate()
    model = place.bigmodel().cpu_offload(model, place.device)
    check(torch.equal(model(x), expected), "outputs are those of each layer by hand")
    seconds = place.medians({"forward": lambda: model(x)}, 5)["forward"]
    return {"rate": size / seconds / 1e9, "pinned": rate / 1e9}


@torch.no_grad()
def prefetch(place: Place) -> Figures:
    """The same forward with weights traveling ahead, in turns with one that waits for each."""
    model, x, expected = _model(place)
    twin = stack(x.shape[1], len(model))
    twin.load_state_dict(model.state_dict(), assign=True)
    size, offload = nbytes(model), place.bigmodel().cpu_offload
    ahead, waiting = offload(model, place.device), offload(twin, place.device, prefetch=False)
    for made in (ahead, waiting):
        check(torch.equal(made(x), expected), "outputs are those of each layer by hand")
    found = place.medians({"ahead": lambda: ahead(x), "waiting": lambda: waiting(x)}, 5)
    return {"ahead": size / found["ahead"] / 1e9, "waiting": size / found["waiting"] / 1e9}


@torch.no_grad()
def disk_offload(place: Place) -> Figures:
    """Forward of a model whose weights are in a checkpoint on disk, page cache warm."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    width, layers = place.size(8192, 64), place.size(12, 4)
    model = filled(place, stack(width, layers))
    x = torch.randn(16, width, device=place.device, dtype=torch.bfloat16)
    expected, size = by_hand(place, model, x), nbytes(model)
    file = place.folder / "model.safetensors"
    save_file(model.state_dict(), file)
    (place.folder / "offload").mkdir()
    places: dict[str, int | str] = {str(number): "disk" if number else 0 for number in range(layers)}
    model = place.bigmodel().load_checkpoint_and_dispatch(
        stack(width, layers), str(file), device_map=places, offload_folder=str(place.folder / "offload")
    )
    check(torch.equal(model(x), expected), "outputs are those of each layer by hand")

    def plain() -> None:
        value = x
        with safe_open(file, "pt") as opened:
            for number in range(1, layers):
                value = nn.functional.linear(value, opened.get_tensor(f"{number}.weight").to(place.device))

    size -= size // layers
    found = place.medians({"forward": lambda: model(x), "plain": plain}, 4)
    return {"rate": size / found["forward"] / 1e9, "plain": size / found["plain"] / 1e9}


@torch.no_grad()
def budget(place: Place) -> Figures:
    """What is on the device at once, under byte budgets of two and four layers."""
    worst = 0.0
    for layers in (2, 4):
        model, x, expected = _model(place)
        layer = nbytes(model) // len(model)
        model = place.bigmodel().cpu_offload(model, place.device, prefetch=layers * layer)
        check(torch.equal(model(x), expected), "outputs are those of each layer by hand")
        model(x)
        before = place.used()
        peak = place.peak(lambda model=model, x=x: model(x)) - before
        worst = max(worst, peak / (layers * layer))
        slack = 8 * x.nbytes + 2 * MIB  # activations, and what the allocator rounds up
        check(peak <= layers * layer + slack, f"at most {layers * layer} bytes of weights at once; got {peak}")
        check(place.used() == before, f"after the pass the device holds {before} bytes; got {place.used()}")
    return {"share": worst}


@torch.no_grad()
def larger_than_card(place: Place) -> Figures:
    """A model of 30 GB in bf16 on a card limited to 8 GB, smaller where the host has less than twice the model."""
    available, width = psutil.virtual_memory().available, place.size(12288, 256)
    layer = 2 * width * width
    size = place.size(min(30 * 10**9, available // 2), 24 * layer)
    card = place.size(min(8 * 10**9, place.total() // 2), 6 * layer)
    if size < 2 * card:
        raise NotHere(f"the host has {available / GIB:.0f} GiB free, too few for a model of twice the card's limit")
    model = filled(place, stack(width, size // layer))
    if hasattr(place.module, "empty_cache"):
        place.module.empty_cache()
    place.limit(card)
    x = torch.randn(4, width, device=place.device, dtype=torch.bfloat16)
    expected, size = by_hand(place, model, x), nbytes(model)
    try:
        torch.empty(card + layer, dtype=torch.uint8, device=place.device)
    except torch.OutOfMemoryError:
        pass
    else:
        raise Differs(f"the card refuses more than its limit of {card} bytes")
    model = place.bigmodel().cpu_offload(model, place.device)
    check(torch.equal(model(x), expected), "outputs are those of each layer by hand")
    peak = place.peak(lambda: model(x))
    check(peak <= card, f"at most {card} bytes at once; got {peak}")
    seconds = place.medians({"forward": lambda: model(x)}, 2, 20.0)["forward"]
    figures = {"size": size, "card": card, "rate": size / seconds, "peak": peak}
    return {"seconds": seconds, **{name: value / 1e9 for name, value in figures.items()}}


def host(place: Place) -> Figures:
    """What the machine has: not a figure of the library, but what the others are read against."""
    found = {"pinned": place.pinned_rate() / 1e9}
    source = torch.empty(place.size(256 * MIB, MIB), dtype=torch.uint8)
    target = torch.empty_like(source, device=place.device)
    seconds = place.medians({"copy": lambda: target.copy_(source)}, 5, 3.0)["copy"]
    written = Path(place.folder, "written")
    block = os.urandom(place.size(256 * MIB, MIB))

    def write() -> None:
        with open(written, "wb") as opened:
            opened.write(block)
            opened.flush()
            os.fsync(opened.fileno())

    disk = len(block) / place.medians({"write": write}, 3, 6.0)["write"]
    return {**found, "pageable": source.nbytes / seconds / 1e9, "disk": disk / 1e9}


ROWS = (
    Row(host, (
        Line("copies of pinned memory to the device (no library)", "pinned", "GB/s"),
        Line("copies of ordinary memory to the device (no library)", "pageable", "GB/s"),
        Line("writes to disk, flushed (no library)", "disk", "GB/s"),
    )),
    Row(cpu_offload, (
        Line("`cpu_offload`, 3 GiB in bf16, forward; limit: copies of pinned memory", "rate", "GB/s", "pinned",
             "≥ 0.90 ×"),
    ), 60, peer=True),
    Row(prefetch, (
        Line("… weights travel ahead; limit: the same without, `prefetch=False`", "ahead", "GB/s", "waiting"),
    ), 60),
    Row(disk_offload, (
        Line("1.4 GiB on disk, page cache warm, forward; limit: safetensors, `.to(device)` and the layer by hand",
             "rate", "GB/s", "plain"),
    ), 60, peer=True),
    Row(budget, (
        Line("largest share of a byte budget on the device at once, activations included", "share", "×", None,
             "≤ 1 and activations"),
    ), 60),
    Row(larger_than_card, (
        Line("a model larger than its card, random weights in bf16: its size", "size", "GB", None, "30 GB"),
        Line("… what the process may have of the card", "card", "GB", None, "8 GB"),
        Line("… forward", "seconds", "s"),
        Line("… weights a second", "rate", "GB/s"),
        Line("… largest memory on the device", "peak", "GB", "card"),
    ), 120),
)  # fmt: skip
