"""Models wrapped by FSDP1, against one process."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import COPIES, LAYERS, WHOLE, advance, blocks, bytes_kept, fsdp, refused
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, PreparationError
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import reset_all
from accel_parallel.fsdp1.strategy import FullyShardedWrapperStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world
from accel_testing.conformance.strategy import CASES, Case, StrategyConformance

plugin = partial(fsdp, 1, **WHOLE)
"""Gives every rank whole states."""


class TestWrapped(StrategyConformance):
    """One wrapper around the model; four ranks are tried with copies of shards."""

    strategy = FullyShardedWrapperStrategy
    sizes = (2,)
    synchronises_late = False

    def arguments(self) -> dict[str, Any]:
        """Return a plugin."""
        return {"fsdp_plugin": plugin()}


class Each(StrategyConformance):
    """A sharding strategy, each layer wrapped."""

    strategy = FullyShardedWrapperStrategy
    synchronises_late = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def arguments(self) -> dict[str, Any]:
        """Return a plugin, and axes where there are copies."""
        axes = ParallelismConfig(**COPIES) if "HYBRID" in self.kind else None
        return {"fsdp_plugin": plugin(sharding_strategy=self.kind, **LAYERS), "parallelism_config": axes}


def _all_cases(conformance: StrategyConformance, cases: tuple[Case, ...]) -> None:
    for case in cases:
        conformance._equals_one_process(case)
        reset_all()
    conformance._synchronises_late()
    reset_all()
    conformance._clips_elements()
    reset_all()


@pytest.mark.parametrize("kind", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@world(2)
def test_what_is_sharded_makes_no_difference(kind: str) -> None:
    """Each strategy trains as one process."""
    _all_cases(Each(kind), CASES[2:])


@pytest.mark.parametrize("kind", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
@world(4)
def test_copies_of_shards_train_as_one_process(kind: str) -> None:
    """Two copies of two shards train as one process."""
    _all_cases(Each(kind), CASES[4:])


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)), nn.Linear(4, 4))


def _blocks(**given: Any) -> FullyShardedDataParallelPlugin:
    return plugin(**blocks("Linear") | given)


@world(2)
def test_a_run_goes_on_from_whole_checkpoints(tmp_path: Path) -> None:
    """AdamW, with two groups and frozen biases, goes on equally after saving wrapped and loading wrapped."""

    def start() -> tuple[Accelerator, Any, Any]:
        reset_all()
        accelerator = Accelerator(fsdp_plugin=_blocks())
        net = _net().eval()
        net[0][0].bias.requires_grad_(False)
        groups = [{"params": list(net[0].parameters()), "weight_decay": 0.0}, {"params": list(net[1:].parameters())}]
        return accelerator, *accelerator.prepare(net, torch.optim.AdamW(groups, lr=0.1))

    def step(accelerator: Accelerator, net: Any, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
        for number in range(steps):
            advance(
                net(torch.full((2, 4), 1.0 + number + accelerator.process_index)).square().mean(),
                optimizer,
                run=accelerator,
            )
        return accelerator.get_state_dict(net)

    accelerator, net, optimizer = start()
    step(accelerator, net, optimizer, 2)
    accelerator.save_state(str(tmp_path / "state"))
    expected = step(accelerator, net, optimizer, 2)
    accelerator, net, optimizer = start()
    accelerator.load_state(str(tmp_path / "state"))
    torch.testing.assert_close(step(accelerator, net, optimizer, 2), expected, rtol=0, atol=0)


@world(2)
def test_recomputed_blocks_and_scaled_gradients() -> None:
    """Recomputed dropout is the same, less is kept, and an infinite gradient of one rank is skipped by all."""
    gradients, kept = [], []
    for recomputed in (False, True):
        accelerator = Accelerator(fsdp_plugin=plugin(activation_checkpointing=recomputed, **blocks("Sequential")))
        net = accelerator.prepare(_net())
        torch.manual_seed(accelerator.process_index)
        with bytes_kept() as sizes:
            loss = net(torch.ones(64, 4)).sum()
        accelerator.backward(loss)
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        kept.append(sum(sizes))
        reset_all()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert kept[1] < kept[0]
    accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=_blocks())
    net = _net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = net(torch.ones(2, 4)).float().sum()
    accelerator.backward(loss * (float("inf") if accelerator.is_main_process else 1.0))
    optimizer.step()
    assert optimizer.step_was_skipped


@world(2)
def test_an_optimizer_of_which_one_rank_has_no_part_is_clipped() -> None:
    """Under fp16, ranks unscale together also where one has nothing of the biases that an optimizer trains."""
    scaler = [GradScalerKwargs(init_scale=64.0)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin(), kwargs_handlers=scaler)
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    net = copy.deepcopy(plain)
    net, weights, biases = accelerator.prepare(net, *(torch.optim.SGD([p], lr=0.1) for p in net.parameters()))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in torch.rand(2, 2, 4):
        accelerator.backward(net(batch).mean())
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.1)
        plain(batch).mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-2, atol=0)
        for each in (weights, biases, optimizer):
            each.step()
            each.zero_grad()
        assert not accelerator.optimizer_step_was_skipped
    parts = accelerator.gather(torch.tensor([each.numel() for each in net.parameters()])[None])
    assert parts[:, 1].min() == 0, "one rank has no part of the biases"
    for trained, expected in zip(accelerator.get_state_dict(net).values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-3)


@world(2)
def test_only_the_first_rank_needs_the_weights() -> None:
    """Ranks without weights get those of rank 0, block by block or at once; ties stay, and optimizers follow."""
    for policy in ("no_wrap", "transformer_based_wrap"):
        accelerator = Accelerator(fsdp_plugin=_blocks(auto_wrap_policy=policy))
        net = nn.Sequential(_net(), nn.BatchNorm1d(4))
        if policy == "no_wrap":
            net[0][2].weight = net[0][0][0].weight
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        if not accelerator.is_main_process:
            net = net.to("meta")
            if policy == "no_wrap":
                net[0][2].weight = net[0][0][0].weight
        prepared, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        torch.testing.assert_close(accelerator.get_state_dict(prepared), expected, rtol=0, atol=0)
        held = optimizer.param_groups[0]["params"]
        assert {id(each) for each in held} == {id(each) for each in prepared.parameters()}
        reset_all()


@world(2)
def test_models_that_cannot_be_flattened_are_refused_first() -> None:
    """Errors are named, and nothing was wrapped."""

    def refuses(match: str, net: nn.Module, *objects: Any) -> None:
        reset_all()
        accelerator = Accelerator(fsdp_plugin=_blocks())
        with refused(PreparationError, match, accelerator, net):
            accelerator.prepare(net, *objects)
        assert not any(isinstance(part, FullyShardedDataParallel) for part in net.modules())

    net = _net()
    stepped = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 4)).sum().backward()
    stepped.step()
    refuses("got SGD with the state of 6", net, stepped)
    mixed = _net()
    mixed[0][0].bias.data = mixed[0][0].bias.data.double()
    refuses(r"got float32 for weight; float64 for bias in 0\.0", mixed)
    reset_all()
    hybrid, axes = plugin(sharding_strategy="HYBRID_SHARD"), ParallelismConfig(dp_shard_size=2)
    with pytest.raises(ConfigurationError, match=r"HYBRID_SHARD replicates shards; got ShardingStrategy\.HYBRID_SHARD"):
        Accelerator(fsdp_plugin=hybrid, parallelism_config=axes)


@world(1)
def test_a_model_after_a_run_with_fsdp_can_be_pickled() -> None:
    """A forward pass, unwrapped and pickled: nothing of the earlier run's engine is on it."""
    Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    reset_all()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2))
    unwrapped = accelerator.unwrap_model(model)
    again = pickle.loads(pickle.dumps(unwrapped))
    assert torch.equal(again.weight, unwrapped.weight)
