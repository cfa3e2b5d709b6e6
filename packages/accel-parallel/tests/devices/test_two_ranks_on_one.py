"""Two ranks that share one GPU over gloo train as one process does on it: every way to share a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.nn import functional

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import InitProcessGroupKwargs
from accel_core.plugins.parallelism import ParallelismConfig, TorchContextParallelConfig, TorchTensorParallelConfig
from accel_core.state import reset_all
from accel_core.testing import requires, world
from accel_parallel.plugin import FullyShardedDataParallelPlugin

DEVICE = torch.device("cuda", 0)
SHARED = {"ACCELERATE_USE_CPU": "false"}
NAMED = {**SHARED, "ACCELERATE_TORCH_DEVICE": str(DEVICE)}
WIDTH, ROWS, WORDS = 8, 8, 2501
KINDS = (
    "ddp",
    "fsdp1",
    "fsdp1 offloaded",
    "fsdp2",
    "fsdp2 offloaded",
    "fsdp2 kept",
    "tp",
    "ep",
    "fsdp2 muon",
)  # gloo sends no CUDA tensors from rank to rank, as pipelines would
SLOW = 30.0  # seconds that two processes take to set the device up, beside ten others

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


@contextmanager
def what_gloo_has() -> Iterator[None]:
    """Skip, in torch's words, what gloo does not do with tensors of a device."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if re.search(r"gloo.*(not support|unsupported|not implemented)|only supports? CPU", text, re.I | re.S):
            pytest.skip(f"gloo says: {text.splitlines()[0]}")
        raise


class Block(nn.Module):
    """A layer that adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Add something."""
        found: Tensor = values + torch.tanh(self.layer(values))
        return found


class Experts(nn.Module):
    """Experts as accel's protocol has them, each a product."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        found = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            row, choice = torch.where(numbers == number)
            found = found.index_add(0, row, weights[row, choice, None] * torch.tanh(tokens[row] @ self.up[number]))
        return found


class Mixture(nn.Module):
    """Sends each token to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, values: Tensor) -> Tensor:
        """Add to each row what its experts make of it."""
        weights, numbers = self.router(values).softmax(-1).topk(2)
        found: Tensor = values + self.experts(values, numbers, weights)
        return found


class Net(nn.Module):
    """Two blocks between a layer in and one out, whose rows two ranks do not share evenly."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        """Return three numbers for each row."""
        values = self.enter(values)
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.leave(values)
        return found


def net(kind: str, seed: int = 3) -> Net:
    """Return the same net on every rank; Muon takes matrices alone."""
    torch.manual_seed(seed)
    made = Net(Mixture if kind == "ep" else Block)
    for each in made.parameters():
        each.requires_grad_(not kind.endswith("muon") or each.dim() == 2)
    return made


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer in which a gradient of a wrong size shows."""
    trained = [each for each in model.parameters() if each.requires_grad]
    if kind.endswith("muon"):
        return torch.optim.Muon(trained, lr=0.01)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


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
            **({"reshard_after_forward": False} if kind.endswith("kept") else {}),
            **({"use_orig_params": True} if kind[4] == "1" else {}),
        )
    if kind == "tp":
        plan = TorchTensorParallelConfig(tp_plan={"blocks.*.layer": "colwise_gather_output"})
        given["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=plan)
    if kind == "ep":
        given["parallelism_config"] = ParallelismConfig(ep_size=2)
    run = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **given)
    assert run.device == DEVICE
    assert run.num_processes == 2
    return run


def rows(steps: int = 3) -> Tensor:
    """Return the batches of all ranks, on the device."""
    return torch.randn(steps, ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).to(DEVICE)


def alone(kind: str, steps: Tensor) -> dict[str, Tensor]:
    """Return the weights of one process on the device that trains on all rows."""
    model = net(kind).to(DEVICE)
    optimizer = optimizer_of(kind, model)
    for batch in steps:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def train(run: Accelerator, model: Any, optimizer: Any, steps: Tensor) -> None:
    """Train on this rank's part of the rows."""
    layout = run._runtime.strategy.layout
    for batch in steps:
        loss = model(batch.chunk(layout.replicas)[layout.part]).square().mean()
        assert loss.device == DEVICE
        run.backward(loss)
        run.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def state(run: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of whole weights, on the CPU."""
    return {name: value.clone().cpu() for name, value in run.get_state_dict(model).items()}


def check(kind: str) -> None:
    """Train in one of the ways and compare with one process."""
    with what_gloo_has():
        run, ours = accelerator(kind), net(kind)
        model, optimizer = run.prepare(ours, optimizer_of(kind, ours))
        train(run, model, optimizer, rows())
        # What Muon orthogonalizes it computes in bfloat16, where the order of a sum shows.
        within = 2e-3 if kind.endswith("muon") else 1e-5
        torch.testing.assert_close(state(run, model), alone(kind, rows()), rtol=0, atol=within)


@pytest.mark.parametrize("kind", KINDS)
@world(2, quiet=SLOW, environment=SHARED)
def test_ranks_train_as_one_process_does(kind: str) -> None:
    """Weights after three clipped steps are those of one process on the same device, on all rows."""
    check(kind)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
@world(2, quiet=SLOW, environment=NAMED)
def test_ranks_that_name_one_device_meet_there(kind: str) -> None:
    """ACCELERATE_TORCH_DEVICE puts both ranks on one device, whatever their number on the machine."""
    check(kind)
    if DEVICE.type == "cuda":
        assert torch.cuda.current_device() == DEVICE.index


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("states", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "fsdp2 offloaded", "tp"])
@world(2, quiet=SLOW, environment=SHARED)
def test_ranks_go_on_where_they_saved(tmp_path: Path, kind: str, states: str, blocking: bool) -> None:
    """Another run has the saved parts bit for bit, and trains on to the same, also where a save went on meanwhile."""

    def made(seed: int) -> tuple[Accelerator, Any, Any]:
        run, ours = accelerator(kind, states), net(kind, seed)
        return (run, *run.prepare(ours, optimizer_of(kind, ours)))

    with what_gloo_has():
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
    with what_gloo_has():
        axes = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(way))
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        run = Accelerator(parallelism_config=axes, kwargs_handlers=handlers, mixed_precision="bf16" if half else "no")
        model, optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        for _ in range(3):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
                output = twin(tokens)
            functional.cross_entropy(output.float().flatten(0, 1), labels.flatten()).backward()
            plain.step()
            plain.zero_grad()
            own = [tokens.clone(), labels.clone()]
            with run.maybe_context_parallel(own, [1, 1], set(own)):
                loss = functional.cross_entropy(model(own[0]).float().flatten(0, 1), own[1].flatten())
                run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        wanted = {name: value.cpu() for name, value in twin.state_dict().items()}
        torch.testing.assert_close(state(run, model), wanted, rtol=0, atol=5e-3 if half else 1e-5)


class Head(nn.Linear):
    """A head that FSDP2 shards on its own."""


class Words(nn.Module):
    """Predicts each token from itself."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(words, WIDTH), Head(WIDTH, words)

    def forward(self, tokens: Tensor, run: Accelerator | None = None) -> Tensor:
        """Return the loss, of whole logits without an Accelerator."""
        hidden = torch.tanh(self.enter(tokens))
        if run is not None:
            return run.linear_cross_entropy(hidden, self.head, tokens, softcap=3.0, chunk=7)
        logits = 3 * torch.tanh(self.head(hidden) / 3)
        return functional.cross_entropy(logits, tokens)


@pytest.mark.parametrize("way", ["sliced", "tp"])
@requires("torch:2.8")
@world(2, quiet=SLOW, environment=SHARED)
def test_ranks_share_a_head_and_its_loss(way: str) -> None:
    """Slices of a sharded head, and parts of one that tensor parallel shares, give gradients of whole logits."""
    torch.manual_seed(0)
    words = WORDS if way == "sliced" else WORDS + 1  # of which tensor parallel wants an even number
    twin, ours, tokens = Words(words).to(DEVICE), Words(words), torch.randint(WORDS, (60,)).to(DEVICE)
    ours.load_state_dict(twin.state_dict())
    twin(tokens).backward()
    given: dict[str, Any] = {}
    if way == "tp":
        plan = TorchTensorParallelConfig(tp_plan={"enter": "embedding_rowwise", "head": "colwise_gather_output"})
        given["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=plan)
    else:
        own = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Head"]}
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **own)
    with what_gloo_has():
        run = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **given)
        model = run.prepare(ours)
        strategy: Any = run._runtime.strategy
        run.backward(model(tokens.chunk(strategy.layout.replicas)[strategy.layout.part], run))
        for (name, one), other in zip(twin.named_parameters(), run.unwrap_model(model).parameters(), strict=True):
            whole = strategy.whole_of(other, other.grad)
            torch.testing.assert_close(
                whole.to(DEVICE), one.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
