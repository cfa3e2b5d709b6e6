"""Two ranks share one GPU over gloo; over NCCL they are refused before it would fail or hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.comm import collectives, objects
from accel_core.comm.padding import pad_across_processes
from accel_core.errors import ConfigurationError
from accel_core.plugins.handlers import InitProcessGroupKwargs
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_testing import world

DEVICE = torch.device("cuda", 0)
SHARED = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": str(DEVICE)}
DTYPES = (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
ROWS, WIDTH, WINDOW = 56, 16, 3

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


def over_gloo(**settings: Any) -> Accelerator:
    """Return an Accelerator whose ranks talk through gloo."""
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **settings)


def net() -> nn.Module:
    """Return a model with the same weights each time, and a buffer that changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 4))


def rows() -> Tensor:
    """Return the data, on the CPU."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs NCCL")
@world(2, environment=SHARED)
def test_nccl_is_refused_on_one_device() -> None:
    """Both ranks hear that they have one device, which ranks have it, and what to do, before a collective is begun."""
    with pytest.raises(ConfigurationError, match=r"one rank for each GPU; got ranks [01] and [01] on cuda:0"):
        Accelerator()
    assert not torch.distributed.is_initialized()


@world(2, environment=SHARED)
def test_tensors_of_the_device_are_exchanged() -> None:
    """Gather, reduce, broadcast and padding keep values, dtypes and devices, of small and of large tensors."""
    here = ensure(backend="gloo")
    assert here.device == DEVICE
    assert here.backend == "gloo"
    values = [torch.arange(6).view(2, 3), *torch.arange(24).view(4, 2, 3), torch.arange(3)]  # some of one shape
    parts = [{str(d): [(each + rank).to(d).to(DEVICE) for each in values] for d in DTYPES} for rank in range(2)]
    mine = {**parts[here.rank], "cpu": torch.ones(1) * here.rank, "large": torch.ones(2**20, device=DEVICE) * here.rank}
    found = collectives.gather(mine)
    for dtype in DTYPES:
        for ours, *theirs in zip(found[str(dtype)], *(part[str(dtype)] for part in parts), strict=True):
            assert (ours.device, ours.dtype) == (DEVICE, dtype)
            assert ours.view(torch.uint8).equal(torch.cat([each.view(torch.uint8) for each in theirs]))
    assert found["cpu"].tolist() == [0.0, 1.0]
    assert found["cpu"].device.type == "cpu"
    assert found["large"].sum().item() == 2**20
    for dtype in DTYPES[1:]:
        totals = collectives.reduce(parts[here.rank][str(dtype)], "sum")
        for ours, *theirs in zip(totals, *(part[str(dtype)] for part in parts), strict=True):
            assert (ours.device, ours.dtype) == (DEVICE, dtype)
            assert ours.double().equal((theirs[0].double() + theirs[1].double()).to(dtype).double())
    given = collectives.broadcast([torch.full((3,), float(here.rank), device=DEVICE)], from_process=1)
    assert given[0].tolist() == [1.0] * 3
    padded = pad_across_processes(torch.ones(here.rank + 1, 2, device=DEVICE), pad_index=7)
    assert padded.device == DEVICE
    assert padded.tolist() == [[1.0, 1.0], [1.0, 1.0] if here.rank else [7.0, 7.0]]
    assert objects.gather_object([here.rank]) == [0, 1]
    assert objects.broadcast_object_list([f"rank {here.rank}"]) == ["rank 0"]


@world(2, environment={**SHARED, "ACCELERATE_CPU_AFFINITY": "1"})
def test_ranks_are_bound_near_the_device_that_they_share() -> None:
    """The second rank looks for the processors near its device, and not near one of its own number."""
    assert ensure(backend="gloo").device == DEVICE
    assert os.sched_getaffinity(0)


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
@world(2, environment=SHARED)
def test_training_is_that_of_one_process(precision: str, tolerance: float) -> None:
    """Weights after an epoch whose last window is short are those of plain PyTorch with batches of both ranks."""
    accelerator = over_gloo(mixed_precision=precision, gradient_accumulation_steps=WINDOW)
    alone, plain = net().to(DEVICE), net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = rows().split(8)
    for first in range(0, len(batches), WINDOW):
        window = batches[first : first + WINDOW]
        for batch in window:
            (alone(batch.to(DEVICE)).square().mean() / len(window)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    loader = DataLoader(TensorDataset(rows()), batch_size=4)
    model, stepped, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader)
    for (batch,) in loader:
        assert batch.device == DEVICE
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            stepped.step()
            stepped.zero_grad()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.device == DEVICE
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@world(2, environment=SHARED)
def test_metrics_of_uneven_data_hold_each_sample_once() -> None:
    """Of 37 samples in batches of 4, all are gathered, once, on the device."""
    accelerator = over_gloo()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(37)), batch_size=4))
    seen = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    assert all(part.device == DEVICE for part in seen)
    assert torch.cat(seen).tolist() == list(range(37))


@world(2, environment=SHARED)
def test_a_run_of_two_ranks_resumes(tmp_path: Path) -> None:
    """Saved by both in the middle of an epoch, a run with dropout goes on as it did, bit for bit."""

    def run(seed: int, *, resume: bool) -> list[Tensor]:
        reset_all()
        accelerator = over_gloo()
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.5), nn.Linear(32, 4))
        loader = DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        model, stepped, loader = accelerator.prepare(plain, optimizer, loader)
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        else:
            torch.manual_seed(seed + accelerator.process_index)
        number = 0
        while loader.iteration < 2:
            for (batch,) in loader:
                accelerator.backward(model(batch).square().mean())
                stepped.step()
                stepped.zero_grad()
                number += 1
                if number == 4 and not resume:
                    accelerator.save_state(str(tmp_path / "state"))
        return [each.detach().clone() for each in model.parameters()]

    straight, resumed = run(0, resume=False), run(5, resume=True)
    assert all(map(torch.equal, resumed, straight))
