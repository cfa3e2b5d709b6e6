"""Training on the device: what a step, a batch, sharding, 8 bits and a checkpoint cost."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_rows.device import without_torchao
from gpu_rows.place import GIB, MIB, Figures, Line, NotHere, Place, Row, check


def step(place: Place) -> Figures:
    """What a training step of a tiny model costs more than the same step of plain PyTorch, the device's work done."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4).to(place.device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    x, steps = torch.randn(2, 4, device=place.device), place.size(200, 3)
    model, optimizer = made()
    accelerator = place.accelerator()
    our_model, our_optimizer = accelerator.prepare(*made())

    def plain() -> None:
        for _ in range(steps):
            model(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def accelerated() -> None:
        for _ in range(steps):
            with accelerator.accumulate(our_model):
                accelerator.backward(our_model(x).sum())
                accelerator.clip_grad_norm_(our_model.parameters(), 1.0)
                our_optimizer.step()
                our_optimizer.zero_grad()

    plain(), accelerated()
    base, added = [], []
    for _ in range(place.size(15, 2)):
        seconds = place.seconds(plain)
        base.append(seconds / steps)
        added.append((place.seconds(accelerated) - seconds) / steps)
    return {"plain": statistics.median(base) * 1e6, "added": statistics.median(added) * 1e6}


def loader(place: Place) -> Figures:
    """Batches a second of a loader whose pinned batches travel ahead, while the device computes."""
    if place.library == "accel":
        from accel_core.plugins.loading import DataLoaderConfiguration
    else:
        from accelerate import DataLoaderConfiguration
    count, width, side = place.size(400, 4), place.size(MIB // 4, 256), place.size(4096, 16)
    data = TensorDataset(torch.randn(place.size(64, 8), width))
    order = [number % len(data) for number in range(8 * count)]
    settings = {"batch_size": 8, "sampler": order, "pin_memory": not place.dry, "num_workers": place.size(2, 0)}
    accelerator = place.accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    plain, prepared = DataLoader(data, **settings), accelerator.prepare(DataLoader(data, **settings))
    busy = torch.randn(side, side, device=place.device)

    def epoch(batches: object, move: bool) -> None:
        for (batch,) in batches:
            batch = batch.to(place.device, non_blocking=True) if move else batch
            check(batch.device == place.device, f"batches are on {place.device}; got {batch.device}")
            batch.sum()
            torch.tanh(busy @ busy)

    found = place.medians({"ours": lambda: epoch(prepared, False), "plain": lambda: epoch(plain, True)}, 3)
    return {"rate": count / found["ours"], "plain": count / found["plain"]}


class Net(nn.Module):
    """Equal blocks behind one another, each sharded by itself."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add each block's output to its input."""
        for block in self.blocks:
            x = x + block(x)
        return x


def fsdp2(place: Place) -> Figures:
    """Steps of a model sharded over the one device, in turns with `fully_shard` by hand; losses are equal."""
    from torch.distributed.fsdp import fully_shard

    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    width, batch = place.size(1024, 16), place.size(512, 2)
    torch.manual_seed(0)
    net = Net(width, place.size(12, 2))
    twin = copy.deepcopy(net).to(place.device)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Sequential"],
                                            auto_wrap_policy="transformer_based_wrap")  # fmt: skip
    accelerator = place.accelerator(fsdp_plugin=plugin)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    mesh = torch.distributed.init_device_mesh(place.device.type, (1,))
    for block in twin.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(twin, mesh=mesh)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    x, losses = torch.randn(batch, width, device=place.device), {"ours": [], "plain": []}

    def ours() -> None:
        for _ in range(4):
            loss = net(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses["ours"].append(loss.detach())

    def by_hand() -> None:
        for _ in range(4):
            loss = twin(x).square().mean()
            loss.backward()
            plain.step()
            plain.zero_grad()
            losses["plain"].append(loss.detach())

    found = place.medians({"ours": ours, "plain": by_hand}, 8)
    for one, other in zip(losses["ours"], losses["plain"], strict=True):
        torch.testing.assert_close(one, other)
    check(losses["ours"][-1] != losses["ours"][0], "the model learns")
    return {"rate": 4 / found["ours"], "plain": 4 / found["plain"]}


def fp8(place: Place) -> Figures:
    """Steps of a model whose matrix products run in 8 bits by torchao, beside the same model in bf16."""
    without_torchao(place)
    from torchao.float8.float8_linear import Float8Linear

    from accel_core.plugins.fp8 import AORecipeKwargs

    width, batch = place.size(4096, 32), place.size(4096, 16)
    if place.device.type == "cpu":
        from torchao.float8 import Float8LinearConfig

        recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True))
    else:
        recipe = AORecipeKwargs()
    torch.manual_seed(0)
    net = Net(width, 2)
    twin = copy.deepcopy(net).to(place.device)
    accelerator = place.accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2))
    converted = sum(isinstance(module, Float8Linear) for module in net.modules())
    check(converted == 2, f"all linear layers but the first and the last are converted; got {converted} of 2")
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
    x, losses = torch.randn(batch, width, device=place.device), []

    def ours() -> None:
        loss = net(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    def bf16() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            output = twin(x)
        output.float().square().mean().backward()
        plain.step()
        plain.zero_grad()

    found = place.medians({"ours": ours, "bf16": bf16}, 8)
    check(losses[-1] < losses[0], f"the loss falls; got {losses[0]} and {losses[-1]}")
    return {"rate": 1 / found["ours"], "bf16": 1 / found["bf16"]}


def bitsandbytes(place: Place) -> Figures:
    """A model loaded in 4 bits gives what bitsandbytes' own layers give, and takes a fraction of the memory."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NotHere("bitsandbytes is not installed")
    import bitsandbytes as library
    from safetensors.torch import save_file

    from accel_quant import BnbQuantizationConfig, load_and_quantize_model

    width = place.size(4096, 64)
    torch.manual_seed(0)
    model = Net(width, 2).half().eval()
    save_file(model.state_dict(), place.folder / "model.safetensors")
    with torch.device("meta"):
        empty = Net(width, 2).half().eval()
    number_type = torch.float32 if place.device.type == "cpu" else torch.float16
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", torch_dtype=number_type,
                                   bnb_4bit_compute_dtype=number_type, skip_modules=[])  # fmt: skip
    packed = load_and_quantize_model(empty, config, weights_location=str(place.folder), device_map={"": place.device})
    hand = copy.deepcopy(model)
    for block in hand.blocks:
        for index in (0, 2):
            layer = block[index]
            made = library.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                compute_dtype=number_type,
                quant_type="nf4",
                compress_statistics=config.bnb_4bit_use_double_quant,
            )
            made.load_state_dict(layer.state_dict())
            block[index] = made
    hand = hand.to(number_type).to(place.device)
    x = torch.randn(4, width, device=place.device, dtype=number_type)
    with torch.no_grad():
        check(torch.equal(packed(x), hand(x)), "outputs are those of bitsandbytes' own layers")
        plain = model.to(number_type).to(place.device)
        error = ((packed(x) - plain(x)).norm() / plain(x).norm()).item()
    size = sum(parameter.nbytes for parameter in packed.parameters())
    return {"share": size / sum(parameter.nbytes for parameter in model.half().parameters()), "error": 100 * error}


def save_state(place: Place) -> Figures:
    """Saving model and AdamW state from the device: how long training stands still, and what comes back."""
    width, count = place.size(4096, 32), place.size(8, 2)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)]).to(place.device)
    accelerator = place.accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, width, device=place.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    train()
    folder, single = place.folder / "state", place.folder / "single.pt"

    def save() -> None:
        accelerator.save_state(str(folder))
        if place.library != "accel":
            for file in sorted(folder.iterdir()):
                _flush(file)

    def plain() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, single)
        _flush(single)

    found = place.medians({"save": save, "plain": plain}, 2, 20.0)
    figures: Figures = {"save": found["save"], "plain": found["plain"],
                        "size": 3 * sum(parameter.nbytes for parameter in model.parameters()) / GIB}  # fmt: skip
    if place.library == "accel":
        figures |= _background(place, accelerator, model, train)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    if place.library != "accel":
        save()
    train()
    accelerator.load_state(str(folder))
    for one, other in zip(model.parameters(), saved, strict=True):
        check(torch.equal(one, other), "the weights come back as they were saved")
    with contextlib.suppress(FileNotFoundError):
        single.unlink()
    return figures


def _background(place: Place, accelerator: object, model: nn.Module, train: object) -> Figures:
    """Save in the background while training goes on; what was saved is what was there when it was asked for."""
    stalls, folder = [], str(place.folder / "state")
    for _ in range(3):
        wanted = [parameter.detach().clone() for parameter in model.parameters()]
        place.module.synchronize()
        begun = time.perf_counter()
        handle = accelerator.save_state(folder, blocking=False)
        stalls.append(time.perf_counter() - begun)
        train()  # changes the weights in place while the save may still read them
        handle.wait()
    accelerator.load_state(folder)
    for one, other in zip(model.parameters(), wanted, strict=True):
        check(torch.equal(one, other), "a background save holds the weights of the moment it was asked for")
    return {"stall": statistics.median(stalls)}


def _flush(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


ROWS = (
    Row(step, (
        Line("added per training step of a tiny model; limit: the plain step", "added", "µs", "plain", "≤ 25 µs"),
    ), peer=True),
    Row(loader, (
        Line("batches of 8 MiB from pinned memory beside computation; limit: the plain loader and `.to`",
             "rate", "/s", "plain", "≥ 0.98 ×"),
    ), 60, peer=True),
    Row(fsdp2, (
        Line("FSDP2 on one device, steps; limit: `fully_shard` by hand, losses equal", "rate", "/s", "plain",
             "≥ 0.98 ×"),
    ), dry="cpu"),
    Row(fp8, (
        Line("fp8 by torchao, not compiled, steps; limit: the same model in bf16", "rate", "/s", "bf16"),
    ), 60, dry="cpu"),
    Row(bitsandbytes, (
        Line("nf4 by bitsandbytes, equal to its own layers: bytes of weights, share of fp16", "share", "×"),
        Line("… error of outputs", "error", "%"),
    ), dry="cpu"),
    Row(save_state, (
        Line("`save_state` from the device; limit: `torch.save` of the same, both flushed", "save", "s", "plain",
             "≤ 1.15 ×"),
        Line("… standstill of a background save; limit: the blocking one", "stall", "s", "save", "≤ 0.25 ×"),
        Line("… bytes saved", "size", "GiB"),
    ), 90, peer=True),
)  # fmt: skip
