"""Two ranks that share one GPU over gloo train as one process does on it, in every way that gloo carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Net, advance
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.nn import functional

from accel_core.accelerator import Accelerator
from accel_core.errors import EngineUnavailableError
from accel_core.plugins.handlers import InitProcessGroupKwargs
from accel_core.plugins.parallelism import ParallelismConfig, TorchContextParallelConfig
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

DEVICE = torch.device("cuda", 0)
SHARED = {"ACCELERATE_USE_CPU": "false"}
NAMED = {**SHARED, "ACCELERATE_TORCH_DEVICE": str(DEVICE)}
WIDTH, ROWS = 8, 8
KINDS = ("ddp", "fsdp1", "fsdp1 offloaded", "fsdp2 offloaded")
REFUSED = ("fsdp2", "tp", "ep")  # gloo crashes where parts of them are gathered
SLOW = 30.0  # seconds that two processes take to set the device up, beside ten others

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


def net(seed: int = 3) -> Net:
    """Return the same net on every rank."""
    torch.manual_seed(seed)
    return Net(entry=WIDTH, width=WIDTH, out=3, count=2)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer in which a gradient of a wrong size shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accelerator(kind: str, states: str = "FULL_STATE_DICT", **given: Any) -> Accelerator:
    """Return an Accelerator that trains on the device in one of the ways, over gloo."""
    if kind.startswith("fsdp"):
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[4]),
            cpu_offload=kind.endswith("offloaded"),
            state_dict_type=states,
            state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=False) if states[0] == "F" else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            **({"use_orig_params": True} if kind[4] == "1" else {}),
        )
    if kind in ("tp", "ep"):
        given["parallelism_config"] = ParallelismConfig(**{f"{kind}_size": 2})
    run = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **given)
    assert run.device == DEVICE
    assert run.num_processes == 2
    return run


def rows(steps: int = 3) -> Tensor:
    """Return the batches of all ranks, on the device."""
    return torch.randn(steps, ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).to(DEVICE)


def alone(steps: Tensor) -> dict[str, Tensor]:
    """Return the weights of one process on the device that trains on all rows."""
    model = net().to(DEVICE)
    optimizer = optimizer_of(model)
    for batch in steps:
        advance(model(batch).square().mean(), optimizer, model=model, clip=0.1)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def train(run: Accelerator, model: Any, optimizer: Any, steps: Tensor) -> None:
    """Train on this rank's part of the rows."""
    layout = run._runtime.strategy.layout
    for batch in steps:
        loss = model(batch.chunk(layout.replicas)[layout.part]).square().mean()
        assert loss.device == DEVICE
        advance(loss, optimizer, run=run, model=model, clip=0.1)


def state(run: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of whole weights, on the CPU."""
    return {name: value.clone().cpu() for name, value in run.get_state_dict(model).items()}


@pytest.mark.parametrize("environment", [SHARED, NAMED])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_process_does(kind: str, environment: dict[str, str]) -> None:
    """Weights after three clipped steps are those of one process on the same device, however the device was chosen."""
    world(2, quiet=SLOW, environment=environment)(check)(kind)


def check(kind: str) -> None:
    """Train in one of the ways and compare with one process."""
    run, ours = accelerator(kind), net()
    model, optimizer = run.prepare(ours, optimizer_of(ours))
    train(run, model, optimizer, rows())
    torch.testing.assert_close(state(run, model), alone(rows()), rtol=0, atol=1e-5)
    assert torch.cuda.current_device() == DEVICE.index


@pytest.mark.parametrize("kind", REFUSED)
@world(2, quiet=SLOW, environment=SHARED)
def test_parts_of_tensors_are_not_exchanged_by_gloo(kind: str) -> None:
    """What splits a model on GPUs over gloo is refused, where torch ended the processes."""
    with pytest.raises(EngineUnavailableError, match="got gloo for cuda"):
        accelerator(kind)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("states", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2 offloaded"])
@world(2, quiet=SLOW, environment=SHARED)
def test_ranks_go_on_where_they_saved(tmp_path: Path, kind: str, states: str, blocking: bool) -> None:
    """Another run has the saved parts bit for bit, and trains on to the same, also where a save went on meanwhile."""

    def made(seed: int) -> tuple[Accelerator, Any, Any]:
        run, ours = accelerator(kind, states), net(seed)
        return (run, *run.prepare(ours, optimizer_of(ours)))

    run, model, optimizer = made(3)
    train(run, model, optimizer, rows())
    handle = run.save_state(str(tmp_path / "state"), blocking=blocking)
    saved = state(run, model)
    train(run, model, optimizer, rows())
    if not blocking:
        handle.wait()
    after = state(run, model)
    run.wait_for_everyone()
    reset_all()
    run, model, optimizer = made(4)
    run.load_state(str(tmp_path / "state"))
    torch.testing.assert_close(state(run, model), saved, rtol=0, atol=0)
    train(run, model, optimizer, rows())
    torch.testing.assert_close(state(run, model), after, rtol=0, atol=1e-6)


class Attending(nn.Module):
    """Causal attention of two heads between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.packed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of each token."""
        values = self.enter(tokens)
        parts = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.packed(values).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        found: Tensor = self.leave(values + self.out(attended.transpose(1, 2).flatten(2)))
        return found


@pytest.mark.parametrize("way", ["allgather", "alltoall"])
@world(2, quiet=SLOW, environment=SHARED)
def test_ranks_share_a_sequence(way: str) -> None:
    """Context parallel, gathered in float32 or along the ring in bf16, trains as one process on whole sequences."""
    tokens, labels = torch.randint(13, (2, 2, 32), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    half = way == "alltoall"
    torch.manual_seed(3)
    twin, ours = Attending().to(DEVICE), Attending()
    ours.load_state_dict(twin.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    axes = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(way))
    handlers = [InitProcessGroupKwargs(backend="gloo")]
    run = Accelerator(parallelism_config=axes, kwargs_handlers=handlers, mixed_precision="bf16" if half else "no")
    model, optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for _ in range(3):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
            output = twin(tokens)
        advance(functional.cross_entropy(output.float().flatten(0, 1), labels.flatten()), plain)
        own = [tokens.clone(), labels.clone()]
        with run.maybe_context_parallel(own, [1, 1], set(own)):
            loss = functional.cross_entropy(model(own[0]).float().flatten(0, 1), own[1].flatten())
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: value.cpu() for name, value in twin.state_dict().items()}
    torch.testing.assert_close(state(run, model), wanted, rtol=0, atol=5e-3 if half else 1e-5)
