"""Mixtures of transformers whose experts ranks share out train as they do in one process, balancing loss and all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.mesh.tensor import whole
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_core.testing import requires, world
from accel_parallel.plugin import FullyShardedDataParallelPlugin

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "use_cache": False,  # blocks that compute again would add to it twice
}


def model(family: str) -> Any:
    """Return a small model of a family, the same on every rank."""
    import transformers

    torch.manual_seed(1)
    if family == "Mixtral":
        own = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    elif family == "Qwen3Moe":
        own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
        own |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    else:
        own = {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        }
        own |= {"moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        own |= {"qk_nope_head_dim": 4, "v_head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**SIZES | own)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in made.parameters():  # some start as zeros, under which every token takes the same experts
        nn.init.normal_(parameter, std=0.2)
    return made


def batch(step: int, parts: int) -> dict[str, torch.Tensor]:
    """Return what all ranks read in a step; some rows have padding at their end, but as many labels as others."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 32, (2 * parts, 8), generator=generator)
    mask = torch.ones_like(words)
    mask[::2, 6:] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def train(net: nn.Module, run: Accelerator | None, parts: int, steps: int = 5) -> dict[str, torch.Tensor]:
    """Train a model, on this rank's rows in a run, and return its weights whole."""
    # Adam's first steps are signs of gradients, of which some are zero but for rounding.
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    if run is not None:
        net, optimizer = run.prepare(net, optimizer)
    for step in range(steps):
        rows = batch(step, parts)
        if run is None:
            net(**rows).loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        else:
            part = run._runtime.strategy.layout.part
            run.backward(net(**{name: each[2 * part : 2 * part + 2] for name, each in rows.items()}).loss)
            run.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): whole(value).detach() for name, value in net.state_dict().items()}


def accelerator(sharded: bool, **given: Any) -> Accelerator:
    """Return an Accelerator whose ranks share out experts in pairs."""
    recompute = given.pop("recompute", False)
    rest = {"dp_shard_size" if sharded else "dp_replicate_size": ensure().size // 2}
    if sharded:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=recompute
        )
    return Accelerator(parallelism_config=ParallelismConfig(ep_size=2, **rest), **given)


@world(2)
@requires("transformers")
def test_models_of_transformers_train_as_one_process() -> None:
    """Weights after 5 steps are those of one process, on a mesh and sharded, with the balancing loss where there is."""
    for family, sharded in (("Mixtral", True), ("Qwen3Moe", False), ("DeepseekV3", True)):
        net = model(family)
        expected = train(copy.deepcopy(net), None, 2)
        reset_all()
        for name, value in train(net, accelerator(sharded), 2).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=f"{family}: {name}")


@world(4, quiet=30)
@pytest.mark.full("another case of a grid")
@requires("transformers")
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("way", ["copies", "shards", "recomputed", "compiled by region"])
def test_four_ranks_train_models_of_transformers_as_one_process(family: str, way: str) -> None:
    """Pairs that share out experts, copied or sharded beside; with blocks computed again, and compiled."""
    net = model(family)
    expected = train(copy.deepcopy(net), None, 4)
    given: dict[str, Any] = {"recompute": way == "recomputed"}
    if way == "compiled by region":
        given["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    for name, value in train(net, accelerator(way != "copies", **given), 4).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@world(2, quiet=30)
@pytest.mark.full("another case of a grid")
@requires("transformers")
@pytest.mark.parametrize("sharded", [False, True])
def test_bf16_is_as_near_to_float32_as_without_shared_experts(sharded: bool) -> None:
    """In mixed precision, weights are as far from those of float32 as those of a run that shares out none."""
    net = model("Mixtral")
    exact = train(copy.deepcopy(net), None, 2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    dense = Accelerator(mixed_precision="bf16", **{"fsdp_plugin": plugin} if sharded else {})
    others = train(copy.deepcopy(net), dense, 2)
    reset_all()
    found = train(net, accelerator(sharded, mixed_precision="bf16"), 2)

    def apart(state: dict[str, torch.Tensor]) -> float:
        return sum(float((value - exact[name]).square().sum()) for name, value in state.items()) ** 0.5

    assert 0 < apart(found) < 1.5 * apart(others)
