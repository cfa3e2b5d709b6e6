"""Losses without whole logits on a GPU: those of whole ones, in the memory that they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from accel_core._torch import shard_groups
from accel_core.accelerator import Accelerator
from accel_core.mesh.tensor import local_part
from accel_core.process import world
from accel_parallel.plugin import FullyShardedDataParallelPlugin

DEVICE = torch.device("cuda", 0)
WORDS, WIDTH, TOKENS = 2501, 64, 300

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


@pytest.fixture(autouse=True)
def leaves_the_group() -> Iterator[None]:
    """Leave the group of one at the end of a test."""
    yield
    world.destroy()


class Head(nn.Linear):
    """A head that FSDP2 shards on its own where its class is named."""


class Net(nn.Module):
    """Returns the loss of tokens, of whole logits where no Accelerator is given."""

    def __init__(self, softcap: float | None) -> None:
        super().__init__()
        self.enter, self.softcap = nn.Embedding(WORDS, WIDTH), softcap
        self.head = Head(WIDTH, WORDS)

    def forward(self, tokens: Tensor, run: Accelerator | None = None) -> Tensor:
        """Predict each token from itself; those of zero do not count."""
        hidden, labels = torch.tanh(self.enter(tokens)), tokens.masked_fill(tokens == 0, -100)
        if run is not None:
            return run.linear_cross_entropy(hidden, self.head, labels, softcap=self.softcap, chunk=70)
        logits = self.head(hidden).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return functional.cross_entropy(logits, labels)


def accelerator(way: str, **given: Any) -> Accelerator:
    """Return an Accelerator that shards nothing, the model in one piece, or its head on its own too."""
    if way != "plain":
        own = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Head"]}
        piece: dict[str, Any] = own if way == "sliced" else {"auto_wrap_policy": "no_wrap"}
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **piece)
    return Accelerator(**given)


def was_whole(head: Any) -> bool:
    """Return whether FSDP2 ever gathered a head on its own, or did so as a part of the rest of the model."""
    return not isinstance(head, FSDPModule) or any(
        hasattr(each, "_unsharded_param") for each in shard_groups(head)[0].fsdp_params
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("way", ["plain", "whole", "sliced"])
def test_loss_and_gradients_are_those_of_whole_logits(way: str, softcap: float | None) -> None:
    """With a bias, a soft cap, and labels that do not count, also where slices of the head are gathered."""
    torch.manual_seed(0)
    alone, ours, tokens = Net(softcap).to(DEVICE), Net(softcap), torch.randint(WORDS, (TOKENS,))
    tokens[:5] = 0
    ours.load_state_dict(alone.state_dict())
    run = accelerator(way)
    model, tokens = run.prepare(ours), tokens.to(DEVICE)
    wanted, loss = alone(tokens), model(tokens, run)
    wanted.backward()
    run.backward(loss)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-5)
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            local_part(other.grad), one.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    if way == "sliced":
        assert not was_whole(run.unwrap_model(model).head)


@pytest.mark.parametrize("way", ["plain", "sliced"])
def test_half_precision_is_as_exact_as_whole_logits(way: str) -> None:
    """Under bf16, gradients are no farther from those in float32 than twice what whole logits are."""
    torch.manual_seed(0)
    alone, tokens = Net(None).to(DEVICE), torch.randint(1, WORDS, (TOKENS,), device=DEVICE)
    alone(tokens).backward()
    exact = {name: each.grad.clone() for name, each in alone.named_parameters() if each.grad is not None}
    alone.zero_grad()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        alone(tokens).backward()
    ours = Net(None)
    ours.load_state_dict(alone.state_dict())
    run = accelerator(way, mixed_precision="bf16")
    model = run.prepare(ours)
    run.backward(model(tokens, run))
    for (name, one), other in zip(alone.named_parameters(), run.unwrap_model(model).parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        limit = (one.grad - exact[name]).norm()
        assert 0 < (local_part(other.grad) - exact[name]).norm() <= 2 * limit, name


def peak(call: Callable[[], object]) -> int:
    """Return how many more bytes a call had on the device at once than before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize("way", ["plain", "sliced"])
def test_logits_of_a_chunk_are_all_that_exists(way: str) -> None:
    """Beyond gradients, the device holds logits of some tokens, within a twentieth; whole logits take more."""
    words, width, tokens, chunk = 65536, 512, 4096, 512
    run = accelerator(way)
    model: Any = run.prepare(nn.Sequential(Head(width, words, bias=False)))
    hidden = torch.randn(tokens, width, device=DEVICE, requires_grad=True)
    labels = torch.randint(words, (tokens,), device=DEVICE)

    def learn() -> None:
        run.linear_cross_entropy(hidden, model[0], labels, chunk=chunk).backward()

    def forget() -> None:
        model.zero_grad()
        hidden.grad = None

    learn()  # what libraries keep
    forget()
    floats = tokens * width + words * width + chunk * words
    assert peak(learn) <= 1.05 * 4 * floats
    forget()
    if way == "plain":
        assert peak(lambda: functional.cross_entropy(model(hidden), labels).backward()) > 2 * 4 * floats


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_switch_before_prepare_shards_a_transformers_head(precision: str) -> None:
    """Its loss and gradients are those of its own logits, and its head is never whole."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = transformers.Gemma2Config(vocab_size=WORDS, final_logit_softcapping=2.0, **sizes, **heads)
    alone = transformers.Gemma2ForCausalLM(config).to(DEVICE)
    tokens = torch.randint(WORDS, (2, 64), device=DEVICE)
    wanted = alone(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    ours = transformers.Gemma2ForCausalLM(config)
    ours.load_state_dict(alone.state_dict())
    run = accelerator("whole", mixed_precision=precision)
    run.chunk_logits(ours)
    model = run.prepare(ours)
    got = model(input_ids=tokens, labels=tokens)
    run.backward(got.loss)
    assert got.logits is None
    assert not was_whole(run.unwrap_model(model).lm_head)
    within = 1e-5 if precision == "no" else 2e-2
    torch.testing.assert_close(got.loss.float(), wanted.loss, rtol=0, atol=within)
    for (name, one), other in zip(alone.named_parameters(), run.unwrap_model(model).parameters(), strict=True):
        torch.testing.assert_close(
            local_part(other.grad), one.grad, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )
