"""Losses without whole logits: those of whole ones, where ranks hold parts of the head or shards of the model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accel_core.accelerator import Accelerator
from accel_core.errors import DataError, PreparationError, StateError
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_core.state import reset_all
from accel_core.testing import requires, world
from accel_parallel.plugin import FullyShardedDataParallelPlugin

WORDS, WIDTH, TOKENS = 26, 8, 30


class Net(nn.Module):
    """Returns what enters the head, or the loss."""

    def __init__(self, bias: bool, tied: bool, softcap: float | None) -> None:
        super().__init__()
        self.enter, self.softcap = nn.Embedding(WORDS, WIDTH), softcap
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.enter.weight

    def forward(self, tokens: Tensor, run: Accelerator | None = None) -> Tensor:
        """Return the loss of the tokens, of whole logits without an Accelerator; those of zero do not count."""
        hidden, labels = self.body(self.enter(tokens)), tokens.masked_fill(tokens == 0, -100)
        if run is not None:
            return run.linear_cross_entropy(hidden, self.head, labels, softcap=self.softcap, chunk=7)
        logits = self.head(hidden)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def accelerator(way: str) -> Accelerator:
    """Return an Accelerator that shares a model in one of the ways."""
    given: dict[str, Any] = {}
    if way.startswith("fsdp2"):
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    if way.endswith("tp"):
        plan = TorchTensorParallelConfig(tp_plan={"head": "colwise_gather_output", "enter": "embedding_rowwise"})
        shards = 2 if way.startswith("fsdp2") else 1
        given["parallelism_config"] = ParallelismConfig(tp_size=2, dp_shard_size=shards, tp_handler=plan)
    return Accelerator(cpu=True, **given)


def check(way: str, **given: Any) -> None:
    """Check the loss and every gradient against whole logits in one process."""
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (4, TOKENS))
    tokens[:, :3] = torch.tensor([0, 1, 2])  # each row has as many that count
    tokens[:, 3:].clamp_(min=1)
    alone = Net(**given)
    alone(tokens).backward()
    run, ours = accelerator(way), Net(**given)
    ours.load_state_dict(alone.state_dict())
    model = run.prepare(ours)
    replicas = 1 if way == "tp" else 2
    place = dist.get_rank() * replicas // dist.get_world_size()
    loss = model(tokens.chunk(replicas)[place], run)
    run.backward(loss)
    if replicas == 1:
        torch.testing.assert_close(loss, alone(tokens), rtol=0, atol=1e-6)
    strategy: Any = run._runtime.strategy
    bare = run.unwrap_model(model)
    for (name, wanted), got in zip(alone.named_parameters(), bare.parameters(), strict=True):
        whole = strategy.whole_of(got, got.grad)
        torch.testing.assert_close(whole, wanted.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    reset_all()


CASES = ((False, False, None), (True, False, 3.0), (False, True, None))


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
@requires("torch:2.8")
@world(2)
def test_loss_and_gradients_are_those_of_whole_logits(way: str) -> None:
    """With a bias, a soft cap and a tied weight, and with labels that do not count."""
    for bias, tied, softcap in CASES:
        check(way, bias=bias, tied=tied, softcap=softcap)


@world(2)
def test_losses_of_half_precision_are_added_up_in_single() -> None:
    """Under autocast, products are rounded as those of whole logits are, and sums are not."""
    run = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(WIDTH, WORDS), torch.randn(500, WIDTH), torch.randint(WORDS, (500,))
    with run.autocast():
        whole = functional.cross_entropy(head(hidden).float(), labels)
        got = run.linear_cross_entropy(hidden, head, labels, chunk=64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)


@requires("torch:2.10")
@world(4)
def test_shards_of_a_head_that_ranks_share_give_the_same() -> None:
    """The same where what tensor parallel leaves each rank is sharded."""
    for bias, tied, softcap in CASES:
        check("fsdp2tp", bias=bias, tied=tied, softcap=softcap)


@world(2)
def test_what_has_no_loss_is_named() -> None:
    """Labels of another number, a head whose columns are cut, and models that the switch does not know; none counts."""
    run = accelerator("tp")
    head, hidden = nn.Linear(WIDTH, WORDS), torch.randn(5, WIDTH, requires_grad=True)
    with pytest.raises(StateError, match=r"got hidden states of shape \(5, 8\) and labels of shape \(4,\)"):
        run.linear_cross_entropy(hidden, head, torch.zeros(4, dtype=torch.int64))
    for wrong in (WORDS, -1):
        with pytest.raises(DataError, match=f"got {wrong}. Correct the labels"):
            run.linear_cross_entropy(hidden, head, torch.tensor([0, 1, wrong, -100, 2]))
    # A compiled graph, as one without data, knows no labels; the loss says so.
    graph = torch.compile(lambda labels: run.linear_cross_entropy(hidden, head, labels, softcap=30.0), backend="eager")
    assert graph(torch.tensor([0, 1, WORDS, -100, 2])).isnan()
    flat = nn.Linear(WIDTH, WORDS)
    flat.weight = nn.Parameter(flat.weight.detach().flatten())  # as engines keep shards
    with pytest.raises(StateError, match="is a matrix while its loss is computed"):
        run.linear_cross_entropy(hidden, flat, torch.zeros(5, dtype=torch.int64))
    loss = run.linear_cross_entropy(hidden, head, torch.full((5,), -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    with pytest.raises(PreparationError, match="its loss by parts; got a Net"):
        run.chunk_logits(Net(False, False, None))
    plan = TorchTensorParallelConfig(tp_plan={"head": "rowwise"})
    reset_all()
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=plan))
    model = run.prepare(Net(False, False, None))
    with pytest.raises(StateError, match="name the head in the plan as colwise"):
        model(torch.ones(1, 4, dtype=torch.int64), run)
    reset_all()
    run = accelerator("fsdp2")
    model = run.prepare(Net(False, False, None))
    with pytest.raises(
        StateError, match=r"got a weight with .*inside of the model's forward, where shards are gathered"
    ):
        run.linear_cross_entropy(hidden, model.head, torch.zeros(5, dtype=torch.int64))


@requires("torch:2.8", "transformers")
@pytest.mark.parametrize("way", ["fsdp2", "tp"])
@world(2, quiet=60)
def test_a_switch_applies_it_to_models_of_transformers(way: str) -> None:
    """A model's own loss and gradients, with a soft cap of its configuration; without labels it has its logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": way != "tp"}
    torch.manual_seed(0)
    alone = Gemma2ForCausalLM(Gemma2Config(vocab_size=WORDS, final_logit_softcapping=2.0, **sizes, **heads))
    tokens = torch.randint(WORDS, (2, TOKENS))
    wanted = alone(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    given: dict[str, Any] = {}
    if way == "fsdp2":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    else:
        given["parallelism_config"] = ParallelismConfig(tp_size=2)
    run = Accelerator(cpu=True, **given)
    ours = Gemma2ForCausalLM(alone.config)
    ours.load_state_dict(alone.state_dict())
    model = run.prepare(ours)
    run.chunk_logits(model)
    got = model(input_ids=tokens, labels=tokens)
    run.backward(got.loss)
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss, rtol=0, atol=1e-6)
    for (name, one), other in zip(alone.named_parameters(), run.unwrap_model(model).parameters(), strict=True):
        whole = run._runtime.strategy.whole_of(other, other.grad)
        torch.testing.assert_close(whole, one.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, wanted.logits, rtol=0, atol=1e-5)


def memory(kind: str) -> int:
    """Return bytes of this process's memory, as Linux tells: now, or at its highest."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is reset on Linux only")
@world(2, quiet=30)
def test_logits_of_a_chunk_are_all_that_a_rank_holds() -> None:
    """Beyond gradients, a rank holds logits of some tokens for its part of the vocabulary, within a twentieth."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # glibc keeps no freed block, which would count as used
    words, width, tokens, chunk = 65536, 512, 1024, 512
    plan = TorchTensorParallelConfig(tp_plan={"0": "colwise_gather_output"})
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=plan))
    model: Any = run.prepare(nn.Sequential(nn.Linear(width, words, bias=False)))
    hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.randint(words, (tokens,))
    run.linear_cross_entropy(hidden[:chunk], model[0], labels[:chunk], chunk=chunk).backward()  # what libraries keep
    model.zero_grad()
    hidden.grad = None
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run.linear_cross_entropy(hidden, model[0], labels, chunk=chunk).backward()
    floats = tokens * width + words * width // 2 + chunk * words // 2
    ratio = (memory("VmHWM") - before) / (floats * 4)
    assert ratio <= 1.05, ratio
