"""What stages of a pipeline need of one another, found without memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest
import torch
from several_ranks import Block, Net
from torch import nn

from accel_core.errors import PreparationError, TorchVersionError
from accel_core.host.versions import TORCH_FEATURES, TorchFeature
from accel_core.strategies.parts import Parts
from accel_parallel.pipeline.flow import Flow, stage_in, trace
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.pipeline.stages import lay_out
from accel_parallel.pipeline.strategy import PipelineStrategy
from accel_parallel.sharding.wrapping import repeated_blocks
from accel_testing import requires

pytestmark = requires("torch:2.13")  # pipelines

CPU = torch.device("cpu")


def net(count: int = 4, kind: type[Net] = Net) -> Net:
    """Return blocks between a layer in and a layer out; what runs the blocks, a kind may exchange."""
    return kind(entry=3, width=8, out=1, count=count)


def flow_of(model: nn.Module, *args: Any, **kwargs: Any) -> Flow:
    """Trace a model."""
    blocks = repeated_blocks(model)
    return trace(model, model.forward, blocks, stage_in([*blocks.values()]), (args, kwargs), CPU)


def test_blocks_of_a_plain_model_need_what_stands_before_them() -> None:
    """The layer in is needed by the first block, each block's output by the next, the layer out by the end."""
    model = net()
    values = model(torch.ones(2, 3)).detach()
    flow = flow_of(model, torch.ones(2, 3))
    assert flow.needs[0] == {"enter.weight", "enter.bias"}
    assert [*flow.needs[1:4]] == [{(0, 0)}, {(1, 0)}, {(2, 0)}]
    assert flow.needs[4] == {(3, 0), "leave.weight", "leave.bias"}
    assert [flow.leaf(each).shape for each in flow.crossing(2)] == [(2, 8)]
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(torch.ones(2, 3)), values)


def test_transformers_models_need_what_their_layers_take() -> None:
    """GPT-2's tied head needs the embeddings, Llama's angles need nothing, T5's decoder what the encoder returned."""
    transformers = pytest.importorskip("transformers")
    ids = torch.zeros(2, 5, dtype=torch.long)
    gpt2 = flow_of(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=11)),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        labels=ids,
    )
    assert gpt2.needs[0] == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert gpt2.needs[1] == {(0, 0)}
    assert "transformer.wte.weight" in gpt2.needs[3]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    llama = flow_of(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, vocab_size=11, **sizes)),
        input_ids=ids,
        labels=ids,
    )
    assert [*llama.needs] == [
        {"model.embed_tokens.weight"},
        {(0, 0)},
        {(1, 0)},
        {(2, 0), "model.norm.weight", "lm_head.weight"},
    ]
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0}
    t5 = flow_of(
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(num_layers=2, d_model=8, d_kv=4, d_ff=16, num_heads=2, vocab_size=11, **tokens)
        ),
        input_ids=ids,
        labels=ids,
    )
    assert len(t5.needs) == 4 + 1
    encoded, bias = (1, 0), "encoder.final_layer_norm.weight"
    assert {encoded, bias} <= t5.needs[2] & t5.needs[3]
    assert t5.crossing(3) == (encoded, (2, 0), (2, 1), (2, 2))
    assert (0, 0) not in t5.crossing(2)


class Twice(Net):
    """Runs its first block again."""

    def run(self, values: torch.Tensor) -> torch.Tensor:
        """Run the blocks, and one again."""
        found: torch.Tensor = self.blocks[0](super().run(values))
        return found


class Branches(Net):
    """Looks at values."""

    def run(self, values: torch.Tensor) -> torch.Tensor:
        """Run the blocks if there is something."""
        return super().run(values) if values.sum() > 0 else values


class Skips(Net):
    """Leaves the last block out."""

    def run(self, values: torch.Tensor) -> torch.Tensor:
        """Run all blocks but one."""
        for block in self.blocks[:-1]:
            values = block(values)
        return values


class Remembers(Block):
    """Keeps what it computed."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add something, and keep it."""
        self.kept = super().forward(values)
        return self.kept


class Records(Net):
    """Adds up what its blocks keep."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, block=Remembers)

    def run(self, values: torch.Tensor) -> torch.Tensor:
        """Run the blocks, and add what the first one kept."""
        return super().run(values) + self.blocks[0].kept


class Wrapped(Net):
    """Hands on an object."""

    def forward(self, values: torch.Tensor) -> Any:
        """Return something that is no tensor."""
        return Flow((), ())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Twice, "once each"),
        (Branches, "values of tensors"),
        (Skips, r"blocks\.3, which no call reached"),
        (Records, r"blocks\.0 keeps or records"),
        (Wrapped, "no call reached"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(kind: type[Net], words: str) -> None:
    """What a pipeline cannot run is named, and the model computes as before."""
    model = net(kind=kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PreparationError, match=words):
        flow_of(model, torch.ones(2, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_run_without_pipelines_imports_nothing_of_them() -> None:
    """The strategies of meshes and of FSDP2 leave pipelines, and torch's schedules, to runs that have them."""
    names = "accel_parallel.pipeline.run", "torch.distributed.pipelining"
    program = "import sys, accel_parallel.mesh.strategy, accel_parallel.fsdp2.strategy\n"
    program += f"print(*({{*{names}}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout == "\n"


def test_stages_balance_bytes_or_follow_the_user() -> None:
    """A large head takes blocks from the last stage; `split` decides by hand; V-shaped schedules fold back."""
    model = net(6)
    model.leave = nn.Linear(8, 27)
    assert lay_out(model, PipelineKwargs(), 2).starts == (0, 4)
    model.leave = nn.Linear(8, 1)
    assert lay_out(model, PipelineKwargs(split=["blocks.2"]), 2).starts == (0, 2)
    folded = lay_out(model, PipelineKwargs("dualpipev"), 2)
    assert (folded.ranks, folded.of_rank(0), folded.span(3)[1]) == ((0, 1, 1, 0), [0, 3], 6)
    assert lay_out(model, PipelineKwargs("interleaved_1f1b"), 2).ranks == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (nn.Linear(2, 2), PipelineKwargs(), "which has none"),
        (net(1), PipelineKwargs(), "which has none"),
        (net(3), PipelineKwargs("dualpipev"), "3 blocks in Net for 4 stages"),
        (net(), PipelineKwargs(split=["blocks.9"]), "blocks.9"),
        (net(), PipelineKwargs(split=["blocks.1", "blocks.2"]), "2 stages on 2 ranks; got 3"),
        (net(), PipelineKwargs(microbatches=1), "2 micro-batches or more.*got microbatches=1"),
        (net(), PipelineKwargs("dualpipev", 3), "4 micro-batches or more"),
        (net(), PipelineKwargs("interleaved_1f1b", 5), "microbatches=5 for 4 stages"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), PipelineKwargs(), "whole batch"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused_by_name(model: nn.Module, settings: PipelineKwargs, words: str) -> None:
    """The message names what is in the way."""
    with pytest.raises(PreparationError, match=words):
        lay_out(model, settings, 2)


def test_an_older_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pipelines stand on differs between versions of torch, down to a crash; before anything is made."""
    late = TorchFeature("Training in a pipeline of ranks", "99", "use FSDP")
    monkeypatch.setitem(TORCH_FEATURES, "pipelines", late)
    with pytest.raises(TorchVersionError, match=r"pipeline of ranks.*99"):
        PipelineStrategy(cast(Parts, None))
