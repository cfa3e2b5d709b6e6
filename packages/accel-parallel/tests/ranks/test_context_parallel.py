"""Sequences that ranks share, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from several_ranks import LAYERS, advance, fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import load_model
from accel_core.errors import ConfigurationError, DataError, EngineUnavailableError, StateError
from accel_core.plugins.parallelism import ParallelismConfig, TorchContextParallelConfig
from accel_core.process.world import ensure
from accel_core.random import set_seed
from accel_core.state import reset_all
from accel_core.strategies.parts import SequenceBuffers
from accel_parallel.context import shift_labels
from accel_parallel.context.order import Share, in_order
from accel_parallel.context.parallel import ContextParallel
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

BATCH, HEADS, LENGTH, SIZE = 2, 4, 32, 8
KINDS = ("causal", "sliding", "packed", "padded")
Results = list[torch.Tensor]


def context(kind: str = "allgather") -> ContextParallel:
    """Return context parallel over all ranks."""
    ensure()
    group = dist.group.WORLD
    assert group is not None
    return ContextParallel(group, TorchContextParallelConfig(kind))


def part() -> Share:
    """Return this rank's part of the sequence."""
    here = ensure()
    return Share(LENGTH, here.rank, here.size)


@contextmanager
def block(kind: str = "allgather", mask: torch.Tensor | None = None) -> Iterator[None]:
    """Open a block that splits a mask along its queries, or some tokens."""
    given, dim = (torch.zeros(BATCH, LENGTH), 1) if mask is None else (mask, 2)
    with context(kind).split(SequenceBuffers([given], [dim])):
        yield


def mask_of(kind: str) -> torch.Tensor:
    """Return a mask of the whole sequence; every query sees a key."""
    places = torch.arange(LENGTH)
    mask = places[None] <= places[:, None]
    if kind == "sliding":
        mask = mask & (places[:, None] - places[None] < 6)
    if kind == "packed":
        mask = mask & (places[None] // 10 == places[:, None] // 10)
    mask = mask[None, None].repeat(BATCH, 1, 1, 1)
    if kind == "padded":
        mask[1, :, :, :5] = False
        mask[1, 0, places, places] = True
    return mask


def tensors(dtype: torch.dtype = torch.float32, groups: int = HEADS) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and a gradient of the result, equal on all ranks."""
    torch.manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, SIZE) for heads in (HEADS, groups, groups, HEADS)]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def attention(given: tuple[torch.Tensor, ...], gradient: torch.Tensor, **arguments: Any) -> Results:
    """Return torch's attention, and the gradients of queries, keys and values."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    out = F.scaled_dot_product_attention(*leaves, **arguments)
    out.backward(gradient)  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(groups: int, dtype: torch.dtype, kind: str = "allgather", masks: Any = (None,), **arguments: Any) -> None:
    """Compare attention in a block with full attention, with a mask that is split, and one that is not."""
    rest = arguments | ({"enable_gqa": True} if groups != HEADS else {})
    *given, gradient = tensors(dtype, groups)
    local = tuple(part().of(tensor, 2) for tensor in given)
    for mask in masks:
        whole = attention(tuple(given), gradient, attn_mask=mask, **rest)
        for split in (None,) if mask is None else (None, mask.clone()):
            with block(kind, split):
                got = attention(local, part().of(gradient, 2), attn_mask=mask if split is None else split, **rest)
            assert len(got) == len(whole) == 4
            for one, other in zip(got, whole, strict=True):
                limit = 8 * torch.finfo(dtype).eps * float(other.abs().max())  # in single precision, 1e-6 of it
                assert float((one.double() - part().of(other, 2).double()).abs().max()) <= limit, (mask, split)


@pytest.mark.parametrize("ranks", [2, 4])
@world("ranks")
def test_gathered_attention_equals_full_attention(ranks: int) -> None:
    """Any mask, as truth values and as numbers, in two formats, with as many keys as queries and fewer.

    Four ranks also compare a ring.
    """
    for groups, dtype in ((HEADS, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
        masks = [mask_of(kind) for kind in (KINDS if ranks == 2 else ("sliding", "padded"))]
        masks += [torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) for mask in masks]
        compare(groups, dtype, masks=masks)
        compare(groups, dtype, is_causal=True, scale=0.5)
        compare(groups, dtype)
    if ranks == 4:
        compare(HEADS, torch.float32, "alltoall", is_causal=True)


@requires("torch:2.13")
@world(2)
def test_the_ring_equals_full_attention() -> None:
    """Causal attention and attention to everything go round, in both formats."""
    for groups in (HEADS, 2):
        for dtype in (torch.float32, torch.bfloat16):
            compare(groups, dtype, "alltoall", is_causal=True, scale=0.5)
            compare(groups, dtype, "alltoall")


@world(2)
def test_a_mask_of_a_ranks_own_tokens_is_refused_on_all_ranks() -> None:
    """Padding that was split goes with its keys; what says nothing of the other keys is refused."""
    *given, gradient = tensors()
    seen = torch.arange(LENGTH).remainder(5).bool()[None, None, None].repeat(BATCH, 1, 1, 1)
    whole = attention(tuple(given), gradient, attn_mask=seen)
    local = tuple(part().of(tensor, 2) for tensor in given)
    padding = seen.clone()
    with context().split(SequenceBuffers([padding], [-1])):
        got = attention(local, part().of(gradient, 2), attn_mask=padding)
    torch.testing.assert_close(got, [part().of(tensor, 2) for tensor in whole])

    square = torch.ones(LENGTH // 2, LENGTH // 2, dtype=torch.bool)
    for kind, words in (("allgather", "which of all keys"), ("alltoall", "allgather")):
        with pytest.raises(EngineUnavailableError, match=words), block(kind):
            F.scaled_dot_product_attention(*local, attn_mask=square)


def own_kernel(*given: torch.Tensor) -> object:
    """Return what a kernel of attention computes that a model calls by itself, as for documents of various lengths."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given)


REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "ring dropout": ("dropout_p=0.5", lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)),
    "ring bias": (
        "got a mask",
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(LENGTH // 2, LENGTH)),
    ),
    "ring layout": ("queries of shape", lambda q: F.scaled_dot_product_attention(q[0], q[0], q[0])),
    "other keys": ("to 4 keys", lambda q: F.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])),
    "causal queries": (
        "causal attention of 4",
        lambda q: F.scaled_dot_product_attention(q[:, :, :4], q, q, is_causal=True),
    ),
    "two masks": (
        "beside a mask",
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=q.new_zeros(1, LENGTH), is_causal=True),
    ),
    "eager": ('"sdpa"', lambda q: (q @ q.transpose(2, 3)).softmax(-1)),
    "convolution": ("convolution", lambda q: nn.Conv1d(SIZE, 2, 3)(q[:, 0].transpose(1, 2))),
    "recurrent": ("recurrent", lambda q: nn.LSTM(SIZE, 2, batch_first=True)(q[:, 0])),
    "kernel": ("the kernel aten._scaled_dot_product_flash", lambda q: own_kernel(q, q, q)),
    "weights": ("need_weights=False", lambda q: nn.MultiheadAttention(SIZE, 1, batch_first=True)(*[q[:, 0]] * 3)),
}


@world(2)
def test_what_would_see_a_part_of_the_sequence_is_refused() -> None:
    """Attention that a block cannot honor, and layers that mix positions by themselves, are refused by name."""
    query = part().of(tensors()[0], 2)
    for name, (words, call) in REFUSED.items():
        ring = name.startswith("ring")
        with torch.no_grad(), pytest.raises(EngineUnavailableError, match=words):  # noqa: SIM117
            with block("alltoall" if ring else "allgather"):
                call(query)
        if not ring and name != "two masks":
            call(query)  # outside of a block it is torch's own affair
    with block():
        nn.Conv1d(SIZE, 2, 1)(query[:, 0].transpose(1, 2))
        query.softmax(-1)


@world(2)
def test_buffers_are_split_in_place_and_put_back() -> None:
    """Views of one batch hold their parts in the block, and after an error what they held; one may stay split."""
    batch = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, -1)
    inputs, labels, rows = batch[:, :-1], batch[:, 1:], torch.randn(LENGTH, 3)
    before = batch.clone()
    expected = [part().of(tensor, dim).clone() for tensor, dim in ((inputs, 1), (labels, 1), (rows, 0))]
    kept = rows.clone()
    with pytest.raises(KeyError), context().split(SequenceBuffers([inputs, labels, rows, kept], [1, -1, 0, 0], {kept})):  # noqa: PT012
        torch.testing.assert_close([inputs, labels, rows], expected)
        raise KeyError
    torch.testing.assert_close(batch, before)
    torch.testing.assert_close([inputs, labels], [before[:, :-1], before[:, 1:]])
    assert inputs.data_ptr() == batch.data_ptr()
    torch.testing.assert_close(kept, part().of(rows, 0))
    parts = [torch.empty_like(expected[0]) for _ in range(2)]
    dist.all_gather(parts, expected[0])
    torch.testing.assert_close(in_order(parts, 1), inputs)


class Layer(nn.Module):
    """Attention by torch's own module, and a layer after it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.after = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        attended, _ = self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        return x + self.after(x + attended).relu()


class Model(nn.Module):
    """A language model of torch's layers."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, size)
        self.places = nn.Embedding(LENGTH, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(2))
        self.head = nn.Linear(size, 11)
        self.recompute: bool | None = None

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return a score for each token that may follow."""
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        scores: torch.Tensor = self.head(x)
        return scores


def batch_of(step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, the ones that follow, and their places."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH)[None]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean loss over tokens."""
    tokens, labels, places = batch
    return F.cross_entropy(model(tokens, places).flatten(0, 1), labels.flatten())


def averaged(model: nn.Module) -> Results:
    """Return gradients, averaged over ranks."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for gradient in found:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in found]


@world(2)
def test_a_model_of_torchs_layers_trains_in_a_block() -> None:
    """Multi-head attention, recomputed activations and inference give in a block what they give on one process."""
    model, batch = Model(), batch_of()
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    whole = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for recompute in (None, False, True):
        model.zero_grad()
        model.recompute = recompute
        parallel = context()
        with parallel.split(SequenceBuffers(list(batch), [1, 1, 1])):
            loss = loss_of(model, batch)
            with parallel.around_backward():
                loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(averaged(model), whole, rtol=1e-5, atol=1e-7)
    encoder = nn.TransformerEncoderLayer(SIZE, 2, batch_first=True).eval()
    states = tensors()[0][:, 0]
    with torch.inference_mode():
        whole_states = encoder(states)
        with block():
            part_of_states = encoder(part().of(states, 1))
        torch.testing.assert_close(part_of_states, part().of(whole_states, 1), rtol=1e-5, atol=1e-6)
        expected = model(batch[0], batch[2])
        made_here = torch.zeros(BATCH, LENGTH)
        with context().split(SequenceBuffers([*batch, made_here], [1] * 4)):
            assert made_here.shape[1] == LENGTH // 2
            got = model(batch[0], batch[2])
        torch.testing.assert_close(got, part().of(expected, 1), rtol=1e-5, atol=1e-6)
        assert made_here.shape[1] == LENGTH


class Packed(Model):
    """A language model whose rows hold several documents, each with places from 0 on."""

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None = None, one_by_one: bool = False
    ) -> torch.Tensor:
        """Return scores; without a mask, tokens see those of their document, as the places tell them apart."""
        x = self.tokens(tokens) + self.places(places)
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        if one_by_one:
            starts = sorted({0, *places[0].eq(0).nonzero().flatten().tolist(), places.shape[1]})
            parts = heads.split([end - start for start, end in pairwise(starts)], 2)
            attended = torch.cat([F.scaled_dot_product_attention(*[part] * 3, is_causal=True) for part in parts], 2)
        else:
            attended = F.scaled_dot_product_attention(
                heads, heads, heads, attn_mask=mask_of_documents(places) if mask is None else mask
            )
        scores: torch.Tensor = self.head(x + attended.transpose(1, 2).flatten(2))
        return scores


def mask_of_documents(places: torch.Tensor) -> torch.Tensor:
    """Return which tokens see which: those of one document, and none that come later."""
    document = places.eq(0).cumsum(1)
    length = places.shape[1]
    return (document[:, :, None].eq(document[:, None]) & torch.ones(length, length).tril().bool())[:, None]


@world(2)
def test_packed_documents_do_not_see_one_another() -> None:
    """With a mask of the whole row: loss and gradients as on one process; what knows a part of it is refused."""
    tokens, labels, _ = batch_of()
    places = torch.cat([torch.arange(count) for count in (10, 15, 7)])[None].repeat(BATCH, 1)
    mask = mask_of_documents(places)

    def loss(model: nn.Module, **more: Any) -> torch.Tensor:
        return F.cross_entropy(model(tokens, places, **more).flatten(0, 1), labels.flatten())

    alone = Packed()
    expected = loss(alone)
    expected.backward()  # type: ignore[no-untyped-call]
    assert not torch.allclose(expected, loss(alone, mask=torch.ones_like(mask).tril())), "documents do not matter"
    torch.testing.assert_close(expected, loss(alone, one_by_one=True))
    for split in (False, True):
        parallel, model, held = context(), Packed(), mask.clone()
        buffers, dims = [tokens, labels, places, *([held] * split)], [1, 1, 1, *([2] * split)]
        with parallel.split(SequenceBuffers(buffers, dims)):
            own = loss(model, mask=held)
            own.backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(own.detach())
        torch.testing.assert_close(own.detach() / 2, expected.detach())
        torch.testing.assert_close(averaged(model), [p.grad for p in alone.parameters() if p.grad is not None])
    buffers = [tokens, labels, places]
    for more, words in (({}, "own tokens alone"), ({"one_by_one": True}, "attends to the tokens that it splits")):
        with pytest.raises(EngineUnavailableError, match=words), context().split(SequenceBuffers(buffers, [1, 1, 1])):
            loss(Packed(), **more)


@world(2)
def test_a_late_backward_that_recomputes_attention_is_refused() -> None:
    """Recomputed activations belong into the block; without them a backward pass may come later."""
    model, batch = Model(), batch_of()
    for recompute, words in ((True, "after the block"), (None, "")):
        model.recompute = recompute
        parallel = context()
        with parallel.split(SequenceBuffers(list(batch), [1, 1, 1], set(batch))):
            loss = loss_of(model, batch)
        refusal = pytest.raises(EngineUnavailableError, match=words) if words else nullcontext()
        with parallel.around_backward(), refusal:
            loss.backward()  # type: ignore[no-untyped-call]
        batch = batch_of()


@pytest.mark.full("compiled once more")
@world(2)
def test_a_compiled_model_attends_over_all_ranks() -> None:
    """A model compiled in a block, or before, computes in it what one process computes, and outside too."""
    model, batch = Model(), batch_of()
    expected = model(batch[0], batch[2])
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with context().split(SequenceBuffers(list(batch), [1, 1, 1])):
            got = compiled(batch[0], batch[2])
        torch.testing.assert_close(got, part().of(expected, 1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled(batch[0], batch[2]), expected)


@world(2)
def test_blocks_that_cannot_be_opened_change_nothing() -> None:
    """A block in a block, and buffers that fit nothing, are refused, and what was given is as it was."""
    parallel, tokens = context(), torch.zeros(BATCH, LENGTH)
    again = parallel.split(SequenceBuffers([tokens], [1]))
    with parallel.split(SequenceBuffers([tokens], [1])), pytest.raises(StateError, match="inside another"), again:
        pass
    version_1 = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(EngineUnavailableError, match=r"FSDP1 .*\['cp'\]"):
        Accelerator(cpu=True, fsdp_plugin=version_1, parallelism_config=ParallelismConfig(cp_size=2))
    uneven = SequenceBuffers([tokens[:, :6]], [1])
    with pytest.raises(ConfigurationError, match="divisible by 4"), parallel.split(uneven):
        pass
    assert tokens.shape == (BATCH, LENGTH)


class Documents(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens, the ones that follow and their places; a different number of them count in each document."""

    def __len__(self) -> int:
        """Return their number."""
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one document."""
        tokens = torch.randint(11, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = shift_labels(tokens)
        labels[: 3 * index] = -100
        return {"tokens": tokens, "labels": labels, "places": torch.arange(LENGTH), "index": torch.tensor(index)}


def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss over the tokens that count, and their number."""
    labels = batch["labels"]
    scores = model(batch["tokens"], batch["places"]).flatten(0, 1)
    return F.cross_entropy(scores, labels.flatten(), ignore_index=-100, reduction="sum"), (labels != -100).sum()


def alone(model: nn.Module) -> tuple[list[float], Results]:
    """Train on one process: windows of four documents in two batches, clipped; return losses and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    documents, losses = Documents(), []
    for _ in range(3):
        for window in range(2):
            batch = torch.utils.data.default_collate([documents[4 * window + place] for place in range(4)])
            loss, count = summed(model, batch)
            advance(loss / count, optimizer, model=model, clip=0.05)
            losses.append(float(loss.detach() / count))
    return losses, [parameter.detach() for parameter in model.parameters()]


def together(accelerator: Accelerator, model: Any) -> tuple[list[float], Results]:
    """Do the same on all ranks, which share each sequence."""
    names = [name for name, _ in model.named_parameters()]
    size = 4 // accelerator.gradient_accumulation_steps // accelerator.parallelism_config.data_parallel_size
    data = torch.utils.data.DataLoader(Documents(), batch_size=size)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), data)
    losses, seen = [], []
    for _ in range(3):
        window = torch.zeros(2)
        for batch in data:
            seen += accelerator.gather_for_metrics(batch["index"]).tolist()
            buffers = [batch[name] for name in ("tokens", "labels", "places")]
            with accelerator.accumulate(model), accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
                with pytest.raises(DataError, match="of each sequence"):
                    accelerator.gather_for_metrics(batch["labels"])
                loss, count = summed(model, batch)
                accelerator.backward(loss, weight=count)
                window += torch.stack([loss.detach(), count])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    total = accelerator.reduce(window, "sum")
                    losses.append(float(total[0] / total[1]))
                    window = torch.zeros(2)
                optimizer.step()
                optimizer.zero_grad()
    assert seen == list(range(8)) * 3, "every sample counts once"
    state = accelerator.get_state_dict(model)
    return losses, [state[name] for name in names] if state else []


def equals_one_process(accelerator: Accelerator, kind: type[nn.Module] = Model) -> None:
    """Compare losses and weights with those of one process."""
    losses, weights = together(accelerator, kind())
    expected_losses, expected = alone(kind())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-6)
    if weights:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["allgather", "alltoall", pytest.param("sharded", marks=requires("torch:2.8"))])
@world(2)
def test_ranks_that_share_sequences_train_as_one_process(kind: str) -> None:
    """Accumulated, weighted and clipped, on whole parameters and on shards, whose activations are computed again."""
    if kind == "sharded":
        return equals_one_process(fully_sharded())
    axes = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(kind))
    accelerator = Accelerator(cpu=True, parallelism_config=axes, gradient_accumulation_steps=2)
    equals_one_process(accelerator)
    set_seed(1, device_specific=True)
    draws = accelerator.gather(torch.rand(1)).tolist()
    assert len(set(draws)) == 2, "dropout differs between parts of a sequence"
    if kind == "allgather":  # without the average over ranks
        reset_all()
        broken: Any = Accelerator(cpu=True, parallelism_config=axes, gradient_accumulation_steps=2)
        broken._runtime.strategy.averaging._groups = ()
        with pytest.raises(AssertionError, match="not close"):
            equals_one_process(broken)


@world(2)
def test_metrics_count_what_parts_of_a_sequence_gave() -> None:
    """A loss becomes the mean over the ranks of a sequence, equal values stay, and others that differ are refused."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    rank, words = accelerator.process_index, "differ between ranks that share a sequence: a tensor of shape"
    for batch in accelerator.prepare(torch.utils.data.DataLoader(range(4), batch_size=2)):
        loss = torch.tensor(1.0 + rank)
        given = {
            "loss": loss,
            "rows": loss.repeat(2),
            "equal": batch,
            "names": ["a", "b"],
            "nan": loss[None] * torch.nan,
            "hidden": torch.tensor([[-torch.inf, torch.inf], [torch.finfo().min, torch.finfo().min]]),
        }
        found = accelerator.gather_for_metrics(given)
        assert found["rows"].tolist() == [1.5, 1.5]
        assert found["loss"].tolist() == [1.5]
        assert found["names"] == ["a", "b"]
        assert torch.equal(found["equal"], batch)
        assert found["nan"].isnan().all()
        assert torch.equal(found["hidden"], given["hidden"])
        for different in (batch + rank, loss * torch.arange(2.0), loss.expand(2, 3), torch.ones(2, 3 + rank)):
            with pytest.raises(DataError, match=words):
                accelerator.gather_for_metrics((batch, different))
        for different in (float(rank), str(rank), [rank, 1]):
            with pytest.raises(DataError, match=words.partition(":")[0]):
                accelerator.gather_for_metrics([different])


def fully_sharded(**sizes: int) -> Accelerator:
    """Return an Accelerator that shards each layer, over sequences too."""
    plugin = fsdp(**LAYERS | {"min_num_params": 100}, activation_checkpointing=True)
    axes = ParallelismConfig(cp_size=2, **sizes)
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=axes, gradient_accumulation_steps=2)


class Projected(nn.Module):
    """A language model whose attention heads ranks can share as well."""

    tp_plan = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, size)
        self.places = nn.Embedding(LENGTH, size)
        self.query, self.key, self.value, self.out = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.head = nn.Linear(size, 11)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return a score for each token that may follow."""
        x = self.tokens(tokens) + self.places(places)
        heads = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        scores: torch.Tensor = self.head(x + self.out(attended.transpose(1, 2).flatten(2)))
        return scores


@pytest.mark.full("more axes at once")
@requires("torch:2.8")
@world(4)
def test_ranks_share_sequences_and_products() -> None:
    """Two by two ranks share parts of sequences and heads of attention, sharded or not, and train as one process."""
    axes = ParallelismConfig(cp_size=2, tp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=axes, gradient_accumulation_steps=2)
    equals_one_process(accelerator, Projected)
    reset_all()
    equals_one_process(fully_sharded(tp_size=2), Projected)


@requires("torch:2.8")
@world(4)
def test_copies_and_shards_of_a_model_share_sequences_in_pairs() -> None:
    """Two by two ranks train as one process: shards of a model by parts of sequences, and copies by parts."""
    axes = ParallelismConfig(cp_size=2, dp_replicate_size=2)
    equals_one_process(Accelerator(cpu=True, parallelism_config=axes, gradient_accumulation_steps=2))
    reset_all()
    equals_one_process(fully_sharded(dp_shard_size=2))


@pytest.mark.usefixtures("fresh_state")
def test_a_run_goes_on_with_another_mesh(tmp_path: Path) -> None:
    """Shared, whole, sharded along sequences, shared again: weights are those of a run that was never stopped."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(8):
        advance(loss_of(model, batch_of(step)), optimizer)
    before = None
    for stage, name in enumerate(("shared", "whole", "sharded", "last")):
        _goes_on(before=before, after=tmp_path / name, first=2 * stage, name=name, ranks=1 if name == "whole" else 2)
        before = tmp_path / name
    reset_all()
    again = Accelerator(cpu=True).prepare(Model())
    load_model(again, tmp_path / "last" / "exported")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@world("ranks")
def _goes_on(before: Path | None, after: Path, first: int, name: str, ranks: int) -> None:
    """Load a checkpoint in place of zeros, take two steps, and save."""
    plugin = fsdp(state_dict_type="SHARDED_STATE_DICT") if name == "sharded" else None
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=ranks), fsdp_plugin=plugin)
    model: Any = Model()
    if before is not None:
        for parameter in model.parameters():
            parameter.data.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    if before is not None:
        accelerator.load_state(str(before))
    for step in (first, first + 1):
        batch = batch_of(step)
        with accelerator.maybe_context_parallel(list(batch), [1, 1, 1], set(batch)):
            accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(after))
    accelerator.save_model(model, after / "exported")
    accelerator.wait_for_everyone()
