"""Losses without whole logits: those of whole ones, where ranks hold parts of the head or shards of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import COPIES, blocks, fsdp, split
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_core._torch import shard_groups
from accel_core.accelerator import Accelerator
from accel_core.errors import DataError, PreparationError, StateError
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import reset_all
from accel_parallel.fsdp2 import sliced_loss
from accel_testing import requires, world
from accel_testing.memory import MEASURES_MEMORY, Growth

WORDS, WIDTH, TOKENS = 26, 8, 30
MANY = 2501  # words that two ranks do not share out evenly, and do not gather in one slice


class Head(nn.Linear):
    """A head that FSDP2 shards on its own where its class is named."""


class Net(nn.Module):
    """Returns what enters the head, or the loss."""

    def __init__(self, bias: bool, tied: bool, softcap: float | None, words: int = WORDS) -> None:
        super().__init__()
        self.enter, self.softcap = nn.Embedding(words, WIDTH), softcap
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = Head(WIDTH, words, bias=bias)
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


def accelerator(way: str, **given: Any) -> Accelerator:
    """Return an Accelerator that shares a model in one of the ways."""
    if way.startswith("sliced"):
        given["fsdp_plugin"] = fsdp(**blocks("Head"))
    if way == "sliced copies":
        given["parallelism_config"] = ParallelismConfig(**COPIES)
    if way.startswith("fsdp2"):
        given["fsdp_plugin"] = fsdp(state_dict_type="FULL_STATE_DICT")
    if way.endswith("tp"):
        plan = {"head": "colwise_gather_output", "enter": "embedding_rowwise"}
        given["parallelism_config"] = split(plan, dp_shard_size=2 if way.startswith("fsdp2") else 1)
    return Accelerator(cpu=True, **given)


def check(way: str, **given: Any) -> None:
    """Check the loss and every gradient against whole logits in one process."""
    torch.manual_seed(0)
    tokens = torch.randint(given.get("words", WORDS), (4, TOKENS))
    tokens[:, :3] = torch.tensor([0, 1, 2])  # each row has as many that count
    tokens[:, 3:].clamp_(min=1)
    alone = Net(**given)
    alone(tokens).backward()
    run, ours = accelerator(way), Net(**given)
    ours.load_state_dict(alone.state_dict())
    model = run.prepare(ours)
    replicas = 4 if way == "sliced copies" else 1 if way == "tp" else 2
    place = dist.get_rank() * replicas // dist.get_world_size()
    loss = model(tokens.chunk(replicas)[place], run)
    run.backward(loss)
    if replicas == 1:
        torch.testing.assert_close(loss, alone(tokens), rtol=0, atol=1e-6)
    same(gradients(run, model), alone)
    bare = run.unwrap_model(model)
    if way.startswith("sliced"):
        assert was_whole(bare.head) == given["tied"]
    reset_all()


def was_whole(head: Any) -> bool:
    """Return whether FSDP2 ever gathered a head on its own, or did so as a part of the rest of the model."""
    return not isinstance(head, FSDPModule) or any(
        hasattr(each, "_unsharded_param") for each in shard_groups(head)[0].fsdp_params
    )


CASES = ((False, False, None), (True, False, 3.0), (False, True, None))


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
@requires("torch:2.8")
@world(2)
def test_loss_and_gradients_are_those_of_whole_logits(way: str) -> None:
    """With a bias, a soft cap and a tied weight, and with labels that do not count."""
    for bias, tied, softcap in CASES:
        check(way, bias=bias, tied=tied, softcap=softcap)


@pytest.mark.parametrize("words", [WORDS, MANY])
@requires("torch:2.8")
@world(2)
def test_a_head_that_is_sharded_on_its_own_is_never_whole(words: int) -> None:
    """Ranks gather it in one slice or in several, also where they do not share its rows out evenly."""
    for bias, tied, softcap in CASES:
        check("sliced", bias=bias, tied=tied, softcap=softcap, words=words)


@requires("torch:2.8")
@world(2)
def test_operations_of_one_gloo_group_do_not_overlap() -> None:
    """Two that end at once may damage memory in torch 2.13, so each is waited for before another one begins."""
    begun: list[dist.Work] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **named: Any) -> Any:
            assert all(work.is_completed() for work in begun)
            work = call(*args, **named)
            begun.extend([work] if named.get("async_op") else [])
            return work

        return collective

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted(dist.all_reduce))
        for name in ("all_gather_single", "reduce_scatter_single"):
            patch.setattr(sliced_loss, name, noted(getattr(sliced_loss, name)))
        check("sliced", bias=True, tied=False, softcap=None, words=MANY)
    assert len(begun) > 3


@requires("torch:2.10")
@world(4)
def test_copies_and_parts_of_a_sharded_head_learn_the_same() -> None:
    """Ranks that hold copies of a shard average its gradient too, and what tensor parallel leaves is sharded."""
    check("sliced copies", bias=True, tied=False, softcap=None, words=MANY)
    for bias, tied, softcap in CASES:
        check("fsdp2tp", bias=bias, tied=tied, softcap=softcap)


def gradients(run: Accelerator, model: Any) -> dict[str, Tensor | None]:
    """Return whole gradients by name."""
    strategy: Any = run._runtime.strategy
    bare = run.unwrap_model(model, keep_torch_compile=False)
    return {name: strategy.whole_of(each, each.grad) for name, each in bare.named_parameters()}


def same(got: dict[str, Tensor | None], alone: nn.Module, share: float = 1.0) -> None:
    """Check gradients against a share of those of one process."""
    for name, each in alone.named_parameters():
        wanted = None if each.grad is None else each.grad * share
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@requires("torch:2.8")
@world(2)
def test_slices_of_a_head_are_gathered_whatever_a_rank_has() -> None:
    """Nothing that counts, more tokens than the others, batches that are added up, a frozen head, and no gradients."""
    torch.manual_seed(0)
    run, alone, ours = accelerator("sliced"), Net(True, False, None, words=MANY), Net(True, False, None, words=MANY)
    ours.load_state_dict(alone.state_dict())
    model = run.prepare(ours)
    tokens = torch.randint(1, MANY, (4, TOKENS))
    own = tokens if run.is_main_process else torch.zeros(1, 7, dtype=torch.int64)
    loss = model(own, run)
    run.backward(loss)
    assert (loss == 0) == (not run.is_main_process)
    alone(tokens).backward()
    same(gradients(run, model), alone, 1 / 2)
    with run.no_sync(model):
        run.backward(model(own, run))
    run.backward(model(own, run))
    same(gradients(run, model), alone, 3 / 2)
    norm = torch.nn.utils.get_total_norm([each.grad for each in alone.parameters() if each.grad is not None])
    torch.testing.assert_close(run.clip_grad_norm_(model.parameters(), 1e9), norm * 3 / 2, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, run), alone(tokens), rtol=0, atol=1e-6)
        torch.testing.assert_close(model(tokens), alone(tokens), rtol=0, atol=1e-6)  # gathers it
    for each in (alone, model):
        each.zero_grad()
        each.head.requires_grad_(False)
    run.backward(model(own, run))
    alone(tokens).backward()
    same(gradients(run, model), alone, 1 / 2)


class Again(Net):
    """Computes hidden states and the loss once more for the backward pass."""

    def forward(self, tokens: Tensor, run: Accelerator | None = None) -> Tensor:
        """Return the loss."""
        loss: Tensor = checkpoint(super().forward, tokens, run, use_reentrant=False)
        return loss


@requires("torch:2.8")
@world(2)
def test_a_loss_in_slices_may_be_computed_again() -> None:
    """Under activation checkpointing, also where batches are added up and one rank has none that count."""
    torch.manual_seed(0)
    run, alone, ours = accelerator("sliced"), Net(True, False, 3.0, words=MANY), Again(True, False, 3.0, words=MANY)
    ours.load_state_dict(alone.state_dict())
    model = run.prepare(ours)
    tokens = torch.randint(1, MANY, (2, TOKENS))
    own = tokens if run.is_main_process else tokens * 0
    for batches in (1, 2, 3):
        run.backward(model(own, run))
        alone(tokens).backward()
        same(gradients(run, model), alone, 1 / 2)
        assert not was_whole(run.unwrap_model(model).head), batches


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@requires("torch:2.8")
@world(2)
def test_slices_in_half_precision_are_as_exact_as_a_whole_head(precision: str) -> None:
    """What FSDP2 gathers in 16 bits, with a scale where fp16 needs it, also in a model that is compiled."""
    torch.manual_seed(0)
    alone, tokens, far = Net(True, False, 3.0, words=MANY), torch.randint(1, MANY, (2, TOKENS)), []
    alone(tokens).backward()
    for way, given in (("whole", {}), ("sliced", {}), ("sliced", {"dynamo_backend": "eager"})):
        if way == "whole":
            given = {"fsdp_plugin": fsdp()}
        scaler = [GradScalerKwargs(init_scale=256.0)]  # with which nothing overflows here
        run = accelerator(way, mixed_precision=precision, kwargs_handlers=scaler, **given)
        ours = Net(True, False, 3.0, words=MANY)
        ours.load_state_dict(alone.state_dict())
        model = run.prepare(ours)
        run.backward(model(tokens[run.process_index, None], run))
        scale = 1.0 if run.scaler is None else run.scaler.get_scale()
        assert (scale > 1) == (precision == "fp16")
        found = {name: gradient / scale for name, gradient in gradients(run, model).items()}
        far.append([float((found[name] - each.grad).norm()) for name, each in alone.named_parameters()])  # type: ignore[operator]
        assert was_whole(run.unwrap_model(model, keep_torch_compile=False).head) == (way == "whole")
        reset_all()
    whole, *others = far
    assert whole[0] > 0
    for each in others:
        assert all(own <= 2 * limit for own, limit in zip(each, whole, strict=True)), far


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
    reset_all()
    run = Accelerator(cpu=True, parallelism_config=split({"head": "rowwise"}))
    model = run.prepare(Net(False, False, None))
    with pytest.raises(StateError, match="name the head in the plan as colwise"):
        model(torch.ones(1, 4, dtype=torch.int64), run)
    reset_all()
    run = accelerator("fsdp2")
    model = run.prepare(Net(False, False, None))
    with pytest.raises(StateError, match=r"got a weight with .*inside of the model's forward, where shards are gather"):
        run.linear_cross_entropy(hidden, model.head, torch.zeros(5, dtype=torch.int64))


@requires("torch:2.8", "transformers")
@pytest.mark.parametrize("way", ["fsdp2", "sliced", "tp"])
@world(2, quiet=60, preload=("transformers.modeling_utils",))
def test_a_switch_applies_it_to_models_of_transformers(way: str) -> None:
    """A model's own loss and gradients, with a soft cap of its configuration; without labels it has its logits.

    Switched before it is prepared, FSDP2 shards its head on its own, and never gathers it.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": way == "fsdp2"}
    torch.manual_seed(0)
    alone = Gemma2ForCausalLM(Gemma2Config(vocab_size=WORDS, final_logit_softcapping=2.0, **sizes, **heads))
    tokens = torch.randint(WORDS, (2, TOKENS))
    wanted = alone(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    engine = {"parallelism_config": ParallelismConfig(tp_size=2)} if way == "tp" else {"fsdp_plugin": fsdp()}
    run = Accelerator(cpu=True, **engine)
    ours = Gemma2ForCausalLM(alone.config)
    ours.load_state_dict(alone.state_dict())
    if way == "sliced":
        run.chunk_logits(ours)
    model = run.prepare(ours)
    if way != "sliced":
        run.chunk_logits(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module .* view")  # of hidden states in the place of logits
        got = model(input_ids=tokens, labels=tokens)
    run.backward(got.loss)
    assert got.logits is None
    assert was_whole(model.lm_head) == (way != "sliced")
    torch.testing.assert_close(got.loss, wanted.loss, rtol=0, atol=1e-6)
    same(gradients(run, model), alone)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, wanted.logits, rtol=0, atol=1e-5)


@MEASURES_MEMORY
@pytest.mark.parametrize("way", ["tp", "sliced"])
@requires("torch:2.8")
@world(2, quiet=30)
def test_logits_of_a_chunk_are_all_that_a_rank_holds(way: str) -> None:
    """Beyond gradients, a rank holds logits of some tokens for its part of the vocabulary, within a twentieth.

    Where FSDP2 shards the head on its own, slices of it and of their gradients take the place of some logits.
    """
    words, width, tokens, chunk = 65536, 512, 1024, 512
    axes = split({"0": "colwise_gather_output"})
    run = Accelerator(cpu=True, parallelism_config=axes) if way == "tp" else accelerator(way)
    model: Any = run.prepare(nn.Sequential(Head(width, words, bias=False)))
    hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.randint(words, (tokens,))
    run.linear_cross_entropy(hidden[:chunk], model[0], labels[:chunk], chunk=chunk).backward()  # what libraries keep
    model.zero_grad()
    hidden.grad = None
    growth = Growth()
    run.linear_cross_entropy(hidden, model[0], labels, chunk=chunk).backward()
    floats = tokens * width + words * width // 2 + chunk * words // 2
    ratio = growth.most() / (floats * 4)
    assert ratio <= 1.05, ratio
