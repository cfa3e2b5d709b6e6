"""LoRA of peft in a pipeline: ranks that hold different blocks train their adapters as one process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_testing import world

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted() -> nn.Module:
    """Return a small Llama with adapters that are not zero, the same on every rank."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=11, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings)
    return found


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return batches of tokens, some of which are padding and count for no loss."""
    drawn = torch.randint(2, 11, (5, 8, 7), generator=torch.Generator().manual_seed(9))
    masks = (torch.arange(7) < torch.arange(8)[:, None] % 4 + 3).long()
    return [{"input_ids": ids, "attention_mask": masks, "labels": torch.where(masks == 1, ids, -100)} for ids in drawn]


def trained(model: nn.Module, optimizer: Any, backward: Any) -> list[float]:
    """Return the losses of a loop."""
    losses = []
    for batch in sentences():
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@world(2, quiet=30)
def test_adapters_train_and_what_they_stand_in_stays() -> None:
    """Weights and losses are those of one process, adapters alone have state, and frozen weights are as they were."""
    start = adapted()
    plain = copy.deepcopy(start)
    losses = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), lambda loss: loss.backward())
    run = Accelerator(parallelism_config=ParallelismConfig(pp_size=2), kwargs_handlers=[PipelineKwargs()], cpu=True)
    model = adapted()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert trained(model, optimizer, run.backward) == pytest.approx(losses, abs=1e-6)
    found, wanted, before = run.get_state_dict(model), plain.state_dict(), start.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)
    assert {name for name in before if not torch.equal(before[name], found[name])} == {
        name for name in before if "lora_" in name
    }
    states = {id(each) for each in optimizer.optimizer.state}
    names = {name for name, each in model.named_parameters() if id(each) in states}
    assert names
    assert all("lora_" in name for name in names)
