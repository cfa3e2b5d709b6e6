"""Language models of transformers and PEFT whose loss takes logits of some tokens at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, Any] = {
    "adapter elsewhere": lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    "adapter on the head": lambda: peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    "task": lambda: peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False),
    "trained head": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(kind: str) -> Any:
    """Return a model with adapters, the same each time."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SIZES))
    return peft.get_peft_model(base, KINDS[kind]())


def check(kind: str, early: bool, **given: Any) -> None:
    """Compare losses, gradients and logits with those of a model that makes its logits in one piece."""
    run, alone, model = Accelerator(cpu=True, **given), adapted(kind), adapted(kind)
    tokens = torch.randint(64, (2, 20))
    wanted = alone(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    if early:
        run.chunk_logits(model, 7)
    model = run.prepare(model)
    if not early:
        run.chunk_logits(model, 7)
    found = model(input_ids=tokens, labels=tokens)
    run.backward(found.loss)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss, rtol=0, atol=1e-6)
    strategy: Any = run._runtime.strategy
    for (name, one), other in zip(alone.named_parameters(), run.unwrap_model(model).parameters(), strict=True):
        whole = strategy.whole_of(other, other.grad)
        torch.testing.assert_close(whole, one.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    logits = alone(input_ids=tokens).logits
    torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=0, atol=1e-5)
    reset_all()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_peft_model_is_its_base_with_its_adapters(kind: str, early: bool) -> None:
    """Adapters of the head and elsewhere, a head that is trained besides and a prompt; asked for early or late."""
    check(kind, early)


@requires("torch:2.8")
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "parts on their own"])
@world(2, quiet=60)
def test_an_adapted_head_has_the_same_loss_on_two_ranks(way: str) -> None:
    """Where ranks average copies, where they gather the head with the rest, and where they gather its parts."""
    given: dict[str, Any] = {}
    if way != "ddp":
        own = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **(own if way == "parts on their own" else {}))
        given["fsdp_plugin"] = plugin
    check("adapter on the head", early=True, **given)


def test_models_that_compute_a_loss_of_their_own_are_named() -> None:
    """An encoder-decoder, a decoder with a loss of its own, a model without a head, and a model that is none."""
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    run, refused = Accelerator(cpu=True), PreparationError
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 2}
    for model in (
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)),
        transformers.BartForCausalLM(transformers.BartConfig(vocab_size=64, **small)),
        transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, **SIZES)),
        nn.Linear(2, 2),
    ):
        before = copy.copy(model.__dict__)
        with pytest.raises(refused, match=f"got a {type(model).__name__}"):
            run.chunk_logits(model)
        assert model.__dict__ == before
    reset_all()
