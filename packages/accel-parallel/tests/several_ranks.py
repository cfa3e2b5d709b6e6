"""What tests of several ranks share: models, ways to share them out, a step, and comparisons with one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig

from accel_core.accelerator import Accelerator
from accel_core.mesh.tensor import whole
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_parallel.plugin import FullyShardedDataParallelPlugin

WHOLE: dict[str, Any] = {
    "state_dict_type": "FULL_STATE_DICT",
    "state_dict_config": FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
}
"""By which FSDP gives every rank whole states."""
LAYERS: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 5}
"""By which FSDP shards each layer on its own."""
COPIES: dict[str, Any] = {"dp_replicate_size": 2, "dp_shard_size": 2}
"""Axes of two copies of two shards."""
WIDTH = 6


def blocks(*names: str) -> dict[str, Any]:
    """Return what makes FSDP shard modules of these classes, each on its own."""
    return {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [*names]}


def fsdp(version: int = 2, **given: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin of FSDP."""
    return FullyShardedDataParallelPlugin(fsdp_version=version, **given)


def split(plan: Any, **sizes: int) -> ParallelismConfig:
    """Return the axes of a mesh in which two ranks split layers by a plan."""
    return ParallelismConfig(**{"tp_size": 2} | sizes, tp_handler=TorchTensorParallelConfig(tp_plan=plan))


class Block(nn.Module):
    """A layer that adds to its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Add something."""
        return values + torch.tanh(self.layer(values))


class Net(nn.Module):
    """Blocks between a layer in, if `entry` is not 0, and one out."""

    def __init__(
        self,
        *,
        entry: int = WIDTH,
        width: int = WIDTH,
        out: int = WIDTH,
        count: int = 4,
        block: Callable[[int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(entry, width) if entry else nn.Identity()
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.leave = nn.Linear(width, out)

    def run(self, values: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            values = block(values)
        return values

    def forward(self, values: Tensor) -> Tensor:
        """Return numbers for each row."""
        found: Tensor = self.leave(self.run(self.enter(values)))
        return found


class Experts(nn.Module):
    """Experts as accel's protocol has them, each a layer up and one down."""

    def __init__(self, count: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 3)
        self.bias = nn.Parameter(torch.randn(count, 2 * width) / 3)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 3)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        found = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            row, choice = torch.where(numbers == number)
            hidden = torch.tanh(tokens[row] @ self.up[number] + self.bias[number])
            found = found.index_add(0, row, weights[row, choice, None] * (hidden @ self.down[number]))
        return found


class Listed(nn.ModuleList):
    """Experts that are modules, of which those that no token is sent to do not run."""

    def __init__(self, count: int = 4, width: int = WIDTH) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.num_experts = count

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            row, choice = torch.where(numbers == number)
            if len(row):
                found = found.index_add(0, row, (weights[row, choice, None] * expert(tokens[row])).to(found.dtype))
        return found


class Mixture(nn.Module):
    """Sends each token to two experts; how, a test may bend."""

    def __init__(self, width: int = WIDTH, count: int = 4, kind: type[Experts | Listed] = Experts) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), kind(count, width)
        self.register_buffer("bent", torch.zeros(count))

    def forward(self, values: Tensor) -> Tensor:
        """Add to each row what its experts make of it."""
        weights, numbers = (self.router(values).softmax(-1) + self.bent).topk(2)
        return values + self.experts(values, numbers, weights)


def advance(
    loss: Tensor,
    *optimizers: Any,
    run: Accelerator | None = None,
    model: nn.Module | None = None,
    clip: float | None = None,
) -> float | None:
    """Take a step for a loss, and forget its gradients; without a run, as PyTorch does.

    Where a window ends, the gradients of `model` are clipped before, if there is a limit; their norm is returned.
    """
    loss.backward() if run is None else run.backward(loss)
    norm = None
    if model is not None and clip is not None and (run is None or run.sync_gradients):
        norm = float((nn.utils if run is None else run).clip_grad_norm_(model.parameters(), clip))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return norm


def assert_trained(run: Accelerator, model: nn.Module, state: dict[str, Tensor], atol: float = 1e-6) -> None:
    """Compare whole weights, which an engine may give to the first rank alone, with a state."""
    found = run.get_state_dict(model)
    if run.is_main_process:
        torch.testing.assert_close(dict(found), dict(state), rtol=0, atol=atol)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare two states bit for bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@contextmanager
def refused(error: type[Exception], match: str, run: Accelerator, *models: nn.Module) -> Iterator[None]:
    """Expect that preparing fails, and leaves models with the parameters that they had."""
    before, prepared = [dict(model.named_parameters()) for model in models], list(run._models)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    for model, had in zip(models, before, strict=True):
        now = dict(model.named_parameters())
        assert now.keys() == had.keys()
        assert all(had[name] is parameter for name, parameter in now.items())
    assert run._models == prepared


def everything(run: Any) -> dict[str, Tensor]:
    """Return the whole weights and moments of a bare run."""
    found: dict[str, Any] = dict(run.models[0].state_dict())
    for key, entries in run.optimizers[0].state_dict()["state"].items():
        found |= {f"{key}/{name}": value for name, value in entries.items()}
    return {name: whole(value).detach().clone() for name, value in found.items()}


class Sharded:
    """What checkpoints ask of a strategy whose format gathers nothing."""

    def __init__(self, form: Any) -> None:
        self.format = form

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return nothing: nobody may gather whole models for a format that does not ask."""
        raise AssertionError("the format did not ask for whole models")


def logged(name: str) -> list[logging.LogRecord]:
    """Return a list to which what a module logs from now on is added."""
    lines: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lines.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


@contextmanager
def bytes_kept() -> Iterator[list[int]]:
    """Note the bytes of each tensor that is kept for the backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda t: t):
        yield sizes
