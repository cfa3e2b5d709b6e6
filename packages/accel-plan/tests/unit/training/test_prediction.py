"""The memory of a training step, beside what shapes say and what real tensors take."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel.meta import init_empty_weights
from accel_core.errors import ConfigurationError, DataError, EngineUnavailableError, PreparationError, StateError
from accel_core.mesh.spec import parse_layout
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.prediction import TrainingMemory, predict
from accel_plan.training.search import tried
from accel_plan.training.workload import TrainingWorkload
from accel_testing import requires

pytestmark = [pytest.mark.slow, requires("torch:2.13")]  # from which on several ranks are planned


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of it."""
        return self.down(self.up(x).relu())


class Mlp(nn.Module):
    """Three blocks and a head, with a plan for tensor parallel."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head makes of it."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Words(nn.Module):
    """A language model with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, 16), nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next tokens."""
        x = self.embedding(tokens)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embedding.weight.t()


class Reading(nn.Linear):
    """A layer that reads a value."""

    def __init__(self) -> None:
        super().__init__(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its result, or zeros."""
        return super().forward(x) if float(x.sum()) > 0 else x


def next_token(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of a language model."""
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def frozen() -> nn.Module:
    """Return a model of which nothing is trained."""
    return Mlp().requires_grad_(False)


def no_model() -> int:
    """Return something else."""
    return 3


NUMBERS = TrainingWorkload(batch=8, sample=(16,))
TOKENS = TrainingWorkload(batch=8, sequence=32, loss=next_token)


def meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes a model without weights."""

    def made() -> nn.Module:
        with init_empty_weights():
            return make()

    return made


def of(layout: str, workload: TrainingWorkload = NUMBERS, make: Any = Mlp, **options: Any) -> TrainingMemory:
    """Return the memory of a step on a layout."""
    return predict(meta(make), parse_layout(layout), workload, **options)


def elements(model: nn.Module, shards: int = 1, cut: int = 1) -> int:
    """Return how many elements the first rank holds: rows are divided, and rounded up; weights of blocks are cut."""
    count = 0
    for name, parameter in model.named_parameters():
        rows, rest = parameter.shape[0], math.prod(parameter.shape[1:])
        if name.startswith("blocks") and name != "blocks.down.bias" and not name.endswith("down.bias"):
            if "down" in name:
                rest //= cut
            else:
                rows //= cut
        count += -(-rows // shards) * rest
    return count


@pytest.mark.parametrize(
    ("layout", "shards", "cut"),
    [("single", 1, 1), ("dp2", 1, 1), ("fsdp4", 4, 1), ("hsdp2x4", 4, 1), ("tp2", 1, 2), ("fsdp2xtp2", 2, 2)],
)
def test_weights_gradients_and_states_are_those_of_the_shapes(layout: str, shards: int, cut: int) -> None:
    """Parameters and gradients take 4 bytes for each element that a rank holds, AdamW's states 8 and its counters."""
    expected = elements(Mlp(), shards, cut)
    found = of(layout)
    parameters = len(list(Mlp().parameters()))
    assert found.most["weights"] == 4 * expected
    assert found.most["gradients"] == 4 * expected
    assert found.most["optimizer"] == 8 * expected + 4 * parameters
    assert found.ranks == parse_layout(layout).ranks
    assert sum(found.at_peak.values()) == found.peak
    if layout == "dp2":  # which reduces in buckets beside the gradients, as torch makes them by default
        assert found.at_peak["communication"] == 4 * expected


class Mixture(nn.Module):
    """Experts that ranks may share out, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        return (torch.einsum("nw,nkwv->nkv", tokens, self.weight[numbers]) * weights[..., None]).sum(1)


class Routed(nn.Module):
    """A model of a router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), Mixture()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of what the experts make of each row."""
        weights, numbers = self.router(values).softmax(-1).topk(2)
        return self.experts(values, numbers, weights).mean()


@pytest.mark.parametrize(("layout", "shards"), [("ep2", 1), ("ep4", 1), ("fsdp2xep2", 4)])
def test_a_rank_holds_its_share_of_the_experts(layout: str, shards: int) -> None:
    """Experts are divided by the size of their axis, and everything else by the number of shards."""
    ranks = parse_layout(layout).size("ep")
    found = predict(Routed, parse_layout(layout), TrainingWorkload(batch=8, sample=(16,)))
    rest = -(-4 // shards) * 16 + -(-4 // shards)
    assert found.most["weights"] == 4 * (4 * 16 * 16 // ranks + rest)
    assert found.most["optimizer"] == 2 * found.most["weights"] + 4 * 3


def test_other_optimizers_and_number_formats() -> None:
    """SGD has no states and one with momentum has one; half-precision weights and their gradients take half."""
    elements_ = elements(Mlp())
    assert of("single", TrainingWorkload(batch=8, sample=(16,), optimizer="SGD")).most["optimizer"] == 0
    momentum = TrainingWorkload(batch=8, sample=(16,), optimizer="sgd", optimizer_arguments={"momentum": 0.9})
    assert of("single", momentum).most["optimizer"] == 4 * elements_
    half = of("single", TrainingWorkload(batch=8, sample=(16,), dtype=torch.bfloat16))
    assert (half.most["weights"], half.most["gradients"]) == (2 * elements_, 2 * elements_)
    mixed = of("fsdp2", TrainingWorkload(batch=8, sample=(16,), precision="bf16"))
    whole = of("fsdp2")
    assert mixed.most["weights"] == whole.most["weights"], "masters are kept in 32 bits"
    assert mixed.most["communication"] < whole.most["communication"], "what is gathered is not"


def test_one_process_has_what_was_predicted() -> None:
    """The bytes alive at once of a step of real tensors, one by one freed, are those of the prediction."""
    model, rows = Mlp(), torch.zeros(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    counter = LiveBytes("any")
    counter.note([*model.parameters(), rows], "any")
    with counter:
        for _ in range(2):
            counter.forget_peak()
            output = model(rows)
            loss = output.float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss
    assert of("single").peak == counter.peak


def parts(model: nn.Module, ranks: int) -> int:
    """Return how many elements of a model a rank of ZeRO has: an equal part, rounded up."""
    return -(-sum(parameter.numel() for parameter in model.parameters()) // ranks)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (1, 2), (2, 2), (2, 4), (3, 1), (3, 2), (3, 8)])
def test_zero_shares_what_its_stage_says(stage: int, ranks: int, precision: str) -> None:
    """Of the copy in 32 bits and AdamW's states a rank has its part, from stage 2 on of gradients, at 3 of weights."""
    layout, size = f"zero{stage}x{ranks}", 4 if precision == "no" else 2
    workload = TrainingWorkload(batch=24, sample=(16,), reduce_bucket=600, precision=precision)
    count, part, found = elements(Mlp()), parts(Mlp(), ranks), of(layout, workload)
    assert found.most["weights"] == size * (part if stage == 3 else count)
    assert found.most["optimizer"] == 3 * 4 * part + 4
    assert found.most["gradients"] == size * (count if stage == 1 else part) + 4 * part, (
        "the step has a copy of its part"
    )
    assert found.most["communication"] == size * (600 + (2 * count if stage == 3 and ranks > 1 else 0))
    assert found.most["batch"] == size * 24 // ranks * 16
    assert sum(found.at_peak.values()) == found.peak
    more = of(layout, dataclasses.replace(workload, reduce_bucket=100_000, accumulation=3))
    assert more.most["communication"] == found.most["communication"] + size * (100_000 - 600)
    assert [more.most[each] for each in ("gradients", "optimizer")] == [
        found.most[each] for each in ("gradients", "optimizer")
    ], "passes add up"


def test_stage_3_takes_frozen_weights_and_shared_reads() -> None:
    """A weight that a model reads outside of its module is gathered there; a frozen one has no gradient and no copy."""
    found, again = of("zero3x2", TOKENS, Words), of("zero3x2", TOKENS, Words, checkpointing=True)
    assert found.most["weights"] == 4 * parts(Words(), 2)
    assert again.most["activations"] < found.most["activations"]

    def half_frozen() -> nn.Module:
        model = Mlp()
        model.blocks.requires_grad_(False)
        return model

    part = of("zero3x2", NUMBERS, half_frozen)
    assert part.most["weights"] == 4 * parts(Mlp(), 2)
    assert part.most["optimizer"] == 12 * parts(Mlp().head, 2) + 4


def test_checkpointing_keeps_less_and_shares_keep_their_part() -> None:
    """Recomputed activations, which need blocks, are fewer; ranks that share sequences or samples hold their part."""
    whole, again = of("single", TOKENS, Words), of("single", TOKENS, Words, checkpointing=True)
    assert again.most["activations"] < whole.most["activations"]
    with pytest.raises(PreparationError, match="in which no block was found"):
        of("single", NUMBERS, lambda: nn.Linear(16, 16), checkpointing=True)
    parts = of("dp4", TOKENS, Words)
    assert parts.most["activations"] == pytest.approx(whole.most["activations"] / 4, rel=0.01)
    assert parts.most["logits"] * 4 == whole.most["logits"]
    shared = of("cp2", TOKENS, Words)
    assert shared.most["logits"] * 2 == whole.most["logits"]
    assert shared.most["weights"] == whole.most["weights"]


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp4", "hsdp2x2"])
def test_a_head_in_slices_is_never_gathered(layout: str) -> None:
    """Where a loss takes logits of some tokens at a time, FSDP2 gathers slices of the head and reduces no whole one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    head = 4 * config.vocab_size * config.hidden_size
    given = TrainingWorkload(batch=8, sequence=16)
    found = [
        of(layout, dataclasses.replace(given, chunk_logits=chunked), lambda: transformers.LlamaForCausalLM(config))
        for chunked in (False, True)
    ]
    whole, slices = (each.most["communication"] for each in found)
    assert whole > 2 * 2 * head, "the embedding, as large as the head, and the head are gathered, and copied on the way"
    assert slices < 2.5 * head, "only the embedding is, besides slices"


def test_shards_gather_blocks_and_accumulate_whole_gradients() -> None:
    """Ranks that hold shards gather a block at a time, and keep whole gradients until the pass that reduces."""
    whole = 4 * elements(Mlp())
    gathered = of("fsdp2").most["communication"]
    assert 4 * elements(Block()) < gathered < 4 * whole
    twice = TrainingWorkload(batch=8, sample=(16,), accumulation=4)
    shards, copies = of("fsdp4"), of("dp2")
    assert of("fsdp4", twice).peak >= shards.peak + whole - 4 * elements(Mlp(), 4) - shards.most["workspace"]
    assert of("fsdp4", twice).most["workspace"] >= whole
    assert of("dp2", twice).most["gradients"] == copies.most["gradients"]


def test_the_smallest_layout_that_fits_is_found() -> None:
    """Fewer ranks come first and checkpointing comes after its absence; each smaller layout does not fit."""
    least = of("fsdp2", TOKENS, Words).peak
    rows = list(tried(meta(Words), TOKENS, least, ranks=4))
    assert [row.peak <= least for row in rows] == [False] * (len(rows) - 1) + [True]
    assert [each.ranks for each in rows] == sorted(each.ranks for each in rows)
    assert rows[0].layout == "single"
    rows = list(tried(meta(Words), TOKENS, least // 2, ranks=2))
    assert {"zero3x2", "pp2"} <= {each.layout for each in rows}
    assert not list(tried(meta(Words), TOKENS, 10, ranks=2)), "weights alone are larger"
    assert not dist.is_initialized()


def test_a_rank_of_1024_has_its_part() -> None:
    """On 1,024 ranks the first holds an eighth of the weights where eight share them, and one sample of the batch."""
    found = of("hsdp128x8", TrainingWorkload(batch=1024, sample=(16,)))
    assert found.ranks == 1024
    assert found.most["weights"] == 4 * elements(Mlp(), 8)
    assert found.most["batch"] == 4 * 16


@pytest.mark.parametrize(
    ("layout", "workload", "make", "error", "said"),
    [
        ("dp3", NUMBERS, Mlp, ConfigurationError, "got batch=8 for 3 of them in dp3"),
        ("cp2", NUMBERS, Mlp, ConfigurationError, "got cp2 and samples without a sequence"),
        ("cp3", TOKENS, Words, ConfigurationError, "got a length of 32"),
        ("pp2xtp2", NUMBERS, Mlp, EngineUnavailableError, "a pipeline with ep, cp or tp for pp2xtp2"),
        ("pp4", NUMBERS, Mlp, PreparationError, "got 3 blocks in Mlp for 4 stages"),
        ("pp2", dataclasses.replace(NUMBERS, split=["head"]), Mlp, PreparationError, "stages begin, in their order"),
        ("pp2", dataclasses.replace(NUMBERS, microbatches=3), Mlp, DataError, "into 3 equal micro-batches"),
        (
            "pp2xfsdp2",
            dataclasses.replace(NUMBERS, schedule="dualpipev"),
            Mlp,
            EngineUnavailableError,
            "schedule='dualpipev' for pp2xf",
        ),
        ("pp2", dataclasses.replace(NUMBERS, schedule="fast"), Mlp, ConfigurationError, "got schedule='fast'"),
        ("zero3x2xsp2", TOKENS, Words, EngineUnavailableError, "got DeepSpeed with sp for zero3x2xsp2"),
        (
            "zero1x2",
            TrainingWorkload(batch=8, sample=(16,), dtype=torch.bfloat16),
            Mlp,
            EngineUnavailableError,
            "bfloat",
        ),
        ("fsdp1xtp2", NUMBERS, Mlp, ConfigurationError, "got fsdp1xtp2"),
        ("tp2", TOKENS, Words, PreparationError, "got Words, which has none"),
        ("tp3", NUMBERS, Mlp, PreparationError, "got out_features=32"),
        ("single", NUMBERS, Reading, ConfigurationError, "a training step of Reading cannot be traced"),
        ("single", TOKENS, Mlp, ConfigurationError, "a training step of Mlp cannot be traced"),
        ("single", NUMBERS, frozen, ConfigurationError, "got a Mlp, none of whose parameters requires a gradient"),
        ("zero2x2", NUMBERS, frozen, ConfigurationError, "got a Mlp, none of whose parameters requires a gradient"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    layout: str, workload: TrainingWorkload, make: Any, error: type[Exception], said: str
) -> None:
    """Each refusal says what it got, and leaves no process group behind."""
    with pytest.raises(error, match=f"(?i){said}"):
        of(layout, workload, make)
    assert not dist.is_initialized()


@pytest.mark.parametrize("layout", ["pp2", "pp2xdp2", "pp2xfsdp2"])
def test_each_rank_of_a_pipeline_has_its_stage(layout: str) -> None:
    """Weights, gradients and moments of the blocks that a rank runs, sharded where FSDP does; the head on the last."""
    found = of(layout, dataclasses.replace(NUMBERS, microbatches=2, split=["blocks.2"]))
    shards = 2 if "fsdp" in layout else 1
    block, head = elements(Block(), shards), elements(nn.Linear(16, 8))
    assert found.pipeline is not None
    assert found.pipeline.blocks == (("blocks.0", "blocks.1"), ("blocks.2", "blocks.2"))
    for at_peak, held in zip(found.pipeline.at_peak, (2 * block, block + head), strict=True):
        assert at_peak["weights"] == pytest.approx(4 * held, rel=0.05)  # and an element for each that others hold
        assert at_peak["optimizer"] == pytest.approx(8 * held, rel=0.05)
    assert found.peak == max(found.pipeline.peaks)


def test_early_backward_passes_keep_fewer_activations() -> None:
    """With eight micro-batches on four ranks, gpipe keeps eight on each rank, and 1f1b as many as stages follow."""

    def deep() -> Mlp:
        made = Mlp()
        made.blocks = nn.ModuleList(Block() for _ in range(4))
        return made

    workload = dataclasses.replace(NUMBERS, batch=1024, microbatches=8)
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        plan = of("pp4", dataclasses.replace(workload, schedule=schedule), deep).pipeline
        assert plan is not None
        kept[schedule] = [each["activations"] for each in plan.at_peak]
    part = 4 * (1024 // 8) * 32  # a block keeps what is in its middle; what it returns is on its way
    assert kept["gpipe"][0] == pytest.approx(8 * part, rel=0.1)
    assert kept["1f1b"][0] == pytest.approx(4 * part, rel=0.15)


def test_a_process_of_a_group_is_no_place_to_plan() -> None:
    """Within a process group nothing is planned, and the group stays."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StateError, match="got one that is in a process group already"):
            of("fsdp2")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_workload_is_checked() -> None:
    """Sizes below one, and tokens together with numbers, are refused."""
    for given, said in (
        ({"batch": 0, "sequence": 4}, "got batch=0"),
        ({"sequence": 0}, "sequence=0"),
        ({"sequence": 4, "sample": (3,)}, r"sequence=4, sample=\(3,\)"),
        ({}, "sequence=None, sample=None"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            TrainingWorkload(**given)
