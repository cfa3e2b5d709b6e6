"""Mixtures of transformers whose experts ranks share out train as they do in one process, balancing loss and all."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from several_ranks import Listed, Mixture, advance, fsdp
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.mesh.tensor import whole
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.experts.layers import is_experts
from accel_testing import requires, world

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


class Block(Mixture):
    """A mixture of sequences."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add what experts make of each token."""
        return super().forward(values.reshape(-1, 16)).view_as(values)


class Loss(NamedTuple):
    """What models of transformers return."""

    loss: torch.Tensor


class Own(nn.Module):
    """A language model as one writes it."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(16, kind=Listed) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Loss:
        """Return the loss of each next word."""
        values = self.words(input_ids)
        for block in self.blocks:
            values = block(values)
        scores = self.head(values)[:, :-1].flatten(0, 1).float()
        return Loss(nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), ignore_index=-100))


def model(family: str) -> Any:
    """Return a small model of a family, the same on every rank."""
    import transformers

    torch.manual_seed(1)
    if family == "own":
        return Own()
    if family == "Mixtral":
        own = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    elif family == "Qwen3Moe":
        own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
        own |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    elif family == "GptOss":
        own = {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * SIZES["num_hidden_layers"]}
        own |= {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
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


def train(
    net: Any,
    run: Accelerator | None,
    parts: int,
    steps: int = 5,
    *,
    clip: float | None = 0.5,
    accumulation: int = 1,
    autocast: bool = False,
) -> dict[str, torch.Tensor]:
    """Train a model, on this rank's rows in a run, and return its weights whole."""
    # Adam's first steps are signs of gradients, of which some are zero but for rounding.
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    if run is not None:
        net, optimizer = run.prepare(net, optimizer)
    for step in range(steps * accumulation):
        rows, last = batch(step, parts), (step + 1) % accumulation == 0
        if run is None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = net(**rows).loss
            (loss / accumulation).backward()
            if last and clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            if last:
                optimizer.step()
                optimizer.zero_grad()
            continue
        part = run._runtime.strategy.layout.part
        with run.accumulate(net):
            loss = net(**{name: each[2 * part : 2 * part + 2] for name, each in rows.items()}).loss
            advance(loss, optimizer, run=run, model=net, clip=clip)
    return {name.removeprefix("module."): whole(value).detach() for name, value in net.state_dict().items()}


def accelerator(sharded: bool, *, recompute: bool = False, compiled: bool = False, **given: Any) -> Accelerator:
    """Return an Accelerator whose ranks share out experts in pairs."""
    rest = {"dp_shard_size" if sharded else "dp_replicate_size": ensure().size // 2}
    if compiled:
        given["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    if sharded:
        given["fsdp_plugin"] = fsdp(auto_wrap_policy="transformer_based_wrap", activation_checkpointing=recompute)
    return Accelerator(parallelism_config=ParallelismConfig(ep_size=2, **rest), **given)


def bend(net: nn.Module, routing: str) -> None:
    """Let experts be given other numbers than a router chose."""

    def bent(_: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, numbers, weights = given
        if routing == "even":
            numbers = torch.arange(numbers.numel()).view_as(numbers) % 4
        elif routing == "all to one expert":
            numbers = torch.zeros_like(numbers)
        elif routing == "none to a rank":
            numbers = numbers % 2
        return tokens, numbers, weights

    for module in net.modules():
        if is_experts(module):
            module.register_forward_pre_hook(bent)


class Case(NamedTuple):
    """A way to train."""

    family: str
    routing: str
    accumulation: int
    clip: float | None
    bf16: bool
    recompute: bool
    compiled: bool


FAMILIES, ROUTINGS = (
    ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "own"),
    ("even", "all to one expert", "none to a rank"),
)
GRID = [Case(*each) for each in itertools.product(FAMILIES, ROUTINGS, (1, 3), (None, 0.5), *[(False, True)] * 3)]


def covering(number: int) -> list[Case]:
    """Return cases of the grid in which every two settings, or as many as are asked for, occur together."""
    together = {each: set(itertools.combinations(enumerate(each), number)) for each in GRID}
    left, found = set[Any]().union(*together.values()), []
    while left:
        found.append(max(GRID, key=lambda each: len(together[each] & left)))
        left -= together[found[-1]]
    return found


def check(case: Case) -> None:
    """Compare the weights after three steps with those of one process, in bf16 as near to float32 as its are."""
    reset_all()
    torch.compiler.reset()
    torch.set_num_threads(1)  # sizes are so small that threads of two ranks only wait for one another
    net = model(case.family)
    bend(net, case.routing)
    settings: dict[str, Any] = {"clip": case.clip, "accumulation": case.accumulation}
    exact = train(copy.deepcopy(net), None, 2, 3, **settings)
    near = train(copy.deepcopy(net), None, 2, 3, autocast=True, **settings) if case.bf16 else exact
    run = accelerator(
        case.recompute or case.clip is None,
        recompute=case.recompute,
        compiled=case.compiled,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulation,
    )
    found = train(net, run, 2, 3, **settings)

    def apart(state: dict[str, torch.Tensor]) -> float:
        return sum(float((value - exact[name]).square().sum()) for name, value in state.items()) ** 0.5

    assert found.keys() == exact.keys()
    if case.bf16:
        assert 0 < apart(found) < 3 * apart(near), case
    else:
        for name, value in found.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


@world(2, quiet=60, preload=("transformers.modeling_utils",))
@requires("transformers")
def test_mixtures_train_as_one_process() -> None:
    """Cases in which every two settings of the grid occur together."""
    for case in covering(2):
        check(case)


@world(2, quiet=60, preload=("transformers.modeling_utils",))
@pytest.mark.full("another case of a grid")
@requires("transformers")
@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_train_as_one_process_in_more_cases(family: str) -> None:
    """Cases in which every three settings of the grid occur together."""
    for case in covering(3):
        if case.family == family:
            check(case)


@world(2, quiet=30, preload=("transformers.modeling_utils",))
@pytest.mark.full("another case of a grid")
@requires("transformers")
def test_transformers_models_continue_on_other_expert_layouts(tmp_path: Path) -> None:
    """What a run with experts on two ranks saved loads bit for bit without expert parallel, and back."""
    for family in FAMILIES:
        saved: dict[str, torch.Tensor] = {}
        for turn, axes in enumerate(({"ep_size": 2}, {"dp_replicate_size": 2}, {"ep_size": 2})):
            reset_all()
            unused = [DistributedDataParallelKwargs(find_unused_parameters=True)] if turn == 1 else []
            run = Accelerator(parallelism_config=ParallelismConfig(**axes), kwargs_handlers=unused)  # type: ignore[arg-type]
            net = model(family)
            net, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
            if turn:
                run.load_state(tmp_path / f"{family} {turn - 1}")
                now = {name: whole(value) for name, value in run.unwrap_model(net).state_dict().items()}
                assert all(torch.equal(now[name], value) for name, value in saved.items()), family
            part = run._runtime.strategy.layout.part
            rows = {name: each[2 * part : 2 * part + 2] for name, each in batch(turn, 2).items()}
            run.backward(net(**rows).loss)
            optimizer.step()
            run.save_state(tmp_path / f"{family} {turn}")
            saved = {name: whole(value).clone() for name, value in run.unwrap_model(net).state_dict().items()}


@world(4, quiet=30, preload=("transformers.modeling_utils",))
@pytest.mark.full("another case of a grid")
@requires("transformers")
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("way", ["copies", "shards", "recomputed", "compiled by region"])
def test_four_ranks_train_models_of_transformers_as_one_process(family: str, way: str) -> None:
    """Pairs that share out experts, copied or sharded beside; with blocks computed again, and compiled."""
    net = model(family)
    expected = train(copy.deepcopy(net), None, 4)
    given = {"recompute": way == "recomputed", "compiled": way == "compiled by region"}
    for name, value in train(net, accelerator(way != "copies", **given), 4).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
