"""A meter, an average of weights and a loss with few logits at once: what they cost a step on the device."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from gpu_rows.place import MIB, Figures, Line, Place, Row, check


def meter(place: Place) -> Figures:
    """Numbers of a meter compared with FlopCounterMode and a clock, in bf16."""
    from accel_core.plugins.handlers import MeterKwargs

    width, rows, steps = place.size(4096, 16), place.size(8192, 4), place.size(30, 3)
    accelerator = place.accelerator(mixed_precision="bf16", kwargs_handlers=[MeterKwargs(every=steps)])
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    twin = copy.deepcopy(model).to(place.device)
    with FlopCounterMode(display=False) as counter:
        twin(torch.rand(rows, width, device=place.device)).sum().backward()
    del twin
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = torch.rand(rows, width, device=place.device)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    step()  # the first is not measured
    wall = place.seconds(lambda: [step() for _ in range(steps)])
    while accelerator.meter.last is None:
        step()  # what was not over on the device before is read now
    found = accelerator.meter.last
    parts = [found.waiting, found.forward, found.backward, found.exchange, found.optimizer, found.saving, found.rest]
    return {
        "flops": found.flops / counter.get_total_flops(),
        "wall": sum(parts) * steps / wall,
        "mfu": "unknown device" if found.mfu is None else 100 * found.mfu,
        "rate": found.flops / (wall / steps) / 1e12,
    }


def meter_cost(place: Place) -> Figures:
    """What a meter adds to a step of a tiny model, in turns with the step without one."""
    from accel_core.plugins.handlers import MeterKwargs

    count = place.size(2000, 4)

    def small(metered: bool) -> Iterator[None]:
        accelerator = place.accelerator(kwargs_handlers=[MeterKwargs()] if metered else [])
        layer = nn.Linear(4, 4)
        loader = DataLoader(torch.rand(2 * (count + 2), 4), batch_size=2)
        layer, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1e-3), loader)
        for batch in loader:
            with accelerator.accumulate(layer):
                accelerator.backward(layer(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            yield

    plain = small(metered=False)
    next(plain)  # its loader is read from before there is a meter
    metered = small(metered=True)
    next(metered)
    added, base = [], []
    for _ in range(count):
        begun = time.perf_counter()
        next(plain)
        between = time.perf_counter()
        next(metered)
        base.append(between - begun)
        added.append(time.perf_counter() - between - base[-1])
    return {"added": 1e6 * statistics.median(added), "step": 1e6 * statistics.median(base)}


def ema(place: Place) -> Figures:
    """An update of averaged weights, in turns with one fused lerp over the same bytes; equal to it."""
    width = place.size(2048, 16)
    accelerator = place.accelerator()
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(place.size(48, 3))])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = accelerator.ema(model)
    parts = [parameter.detach() for parameter in model.parameters()]
    twins = [part.clone() for part in parts]
    for part in parts:
        part.add_(1)
    calls = {
        "update": lambda: average.update(optimizer.optimizer),
        "lerp": lambda: torch._foreach_lerp_(twins, parts, 1 - 0.999),
    }
    found = place.medians(calls, 20)
    for one, other in zip(average.state.averages.values(), twins, strict=True):
        check(torch.equal(one, other), "the average is that of the fused lerp")
    return {"update": 1e3 * found["update"], "lerp": 1e3 * found["lerp"]}


def linear_loss(place: Place) -> Figures:
    """Memory and time of a loss with logits of 1,024 tokens at a time, compared with all logits; gradients equal."""
    tokens, width, words, chunk = (place.size(*sizes) for sizes in ((8192, 8), (4096, 16), (131072, 64), (1024, 4)))
    accelerator = place.accelerator()
    torch.manual_seed(0)
    head = nn.Linear(width, words, bias=False, device=place.device, dtype=torch.bfloat16)
    hidden = torch.randn(tokens, width, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(words, (tokens,), device=place.device)

    def whole() -> torch.Tensor:
        loss = nn.functional.cross_entropy(head(hidden).float(), labels)
        loss.backward()
        return loss.detach()

    def ours() -> torch.Tensor:
        loss = accelerator.linear_cross_entropy(hidden, head, labels, chunk=chunk)
        loss.backward()
        return loss.detach()

    calls, losses, gradients, peaks = {"ours": ours, "whole": whole}, {}, {}, {}
    for name, call in calls.items():
        hidden.grad = head.weight.grad = None
        before = place.used() if not place.dry else 0
        found: list[torch.Tensor] = []
        peaks[name] = place.peak(lambda call=call, found=found: found.append(call())) - before if not place.dry else 1
        losses[name] = found[0] if found else call()
        gradients[name] = hidden.grad.double()
    torch.testing.assert_close(losses["ours"].float(), losses["whole"].float(), rtol=1e-3, atol=1e-3)
    difference = (gradients["ours"] - gradients["whole"]).norm() / gradients["whole"].norm()
    check(difference < 0.02, f"gradients are those of all logits up to the rounding of bf16; got {difference}")
    times = place.medians(calls, 8)
    return {
        **{f"{name} peak": peaks[name] / MIB for name in calls},
        **{f"{name} time": 1e3 * times[name] for name in calls},
    }


ROWS = (
    Row(meter, (
        Line("meter, bf16: FLOPs ÷ FlopCounterMode", "flops", reach="1.000"),
        Line("… sum of the parts ÷ a clock", "wall", reach="1 ± 0.01"),
        Line("… utilization of the device", "mfu", "%"),
        Line("… FLOPs a second by the clock", "rate", "TFLOP/s"),
    ), dry="cpu"),
    Row(meter_cost, (
        Line("added by a meter to a step of a tiny model; limit: the step", "added", "µs", "step", "≤ 5 µs"),
    )),
    Row(ema, (
        Line("average of 0.8 GB of weights, an update; limit: one fused lerp, results equal", "update", "ms", "lerp",
             "≤ 1.1 ×"),
    )),
    Row(linear_loss, (
        Line("loss over 131,072 words, logits of 1,024 of 8,192 tokens at a time: peak; limit: all logits",
             "ours peak", "MiB", "whole peak"),
        Line("… forward and backward; limit: all logits", "ours time", "ms", "whole time"),
    ), dry="cpu"),
)  # fmt: skip
