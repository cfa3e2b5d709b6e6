"""Averages of weights over shards, stages and copies: those of the whole weights, bit for bit, without an exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import WIDTH, Block, Mixture, Net, advance, assert_equal, blocks, fsdp, split
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accel_core.accelerator import Accelerator
from accel_core.errors import EngineUnavailableError, RankDisagreementError, StateError
from accel_core.optim.average import ModelAverage
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_testing import requires, world

DECAY = 0.75
KINDS = ("ddp", "fsdp1", "fsdp2", "tp", "ep", "pp")


def accelerator(kind: str, name: str = "Block") -> Accelerator:
    """Return an Accelerator that trains in one of the ways."""
    size, given = ensure(cpu=True).size, dict[str, Any]()
    if kind.startswith("fsdp"):
        # Under FSDP2 an evaluation leaves weights gathered.
        kept = {"reshard_after_forward": False} if kind.startswith("fsdp2") else {}
        states = "FULL_STATE_DICT" if kind.endswith("whole") else "SHARDED_STATE_DICT"
        given["fsdp_plugin"] = fsdp(int(kind[4]), state_dict_type=states, **blocks(name), **kept)
    if kind.endswith("tp"):
        shards = 2 if kind == "fsdp2tp" else 1
        plan = {"blocks.*.layer": "colwise_gather_output"}
        given["parallelism_config"] = split(plan, tp_size=size // shards, dp_shard_size=shards)
    if kind == "ep":
        given["parallelism_config"] = ParallelismConfig(ep_size=size)
    if kind == "pp":
        given["parallelism_config"] = ParallelismConfig(pp_size=size)
        given["kwargs_handlers"] = [PipelineKwargs(loss_fn=lambda out, _: out.square().mean(), microbatches=2)]
    return Accelerator(cpu=True, **given)


def whole(run: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole weights; under FSDP, on the first rank alone."""
    return {name: value.clone() for name, value in run.get_state_dict(model).items()}


class Training:
    """A training with an average, and the average of whole weights that it is compared with."""

    def __init__(self, kind: str, **given: Any) -> None:
        torch.manual_seed(0)
        model = Net(out=3, block=Mixture if kind == "ep" else Block)
        self.run = accelerator(kind)
        self.kind = kind
        self.model, self.optimizer = self.run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.ema = self.run.ema(self.model, DECAY, **given)
        self.expected = whole(self.run, self.model)
        self.counts: list[int] = []

    def step(self, *, updates: bool = True) -> None:
        """Train on a batch, and average the whole weights as torch does."""
        drawn = torch.Generator().manual_seed(len(self.counts))
        batch = torch.randn(4, WIDTH, generator=drawn)
        with torch.no_grad():  # an evaluation leaves weights gathered
            self.model(batch)
        output = self.model(batch)
        self.run.backward(output.loss if self.kind == "pp" else output.square().mean())
        comm, right = CommDebugMode(), ModelAverage.update

        def counted(average: ModelAverage, optimizer: torch.optim.Optimizer) -> None:
            with comm:
                right(average, optimizer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelAverage, "update", counted)
            self.optimizer.step()
        self.counts.append(comm.get_total_counts())
        self.optimizer.zero_grad()
        weights = whole(self.run, self.model)
        if updates and weights:
            get_ema_multi_avg_fn(DECAY)(list(self.expected.values()), list(weights.values()), None)

    def check(self) -> None:
        """Compare averages while they are applied, and weights after it, with an evaluation in between."""
        weights, before = whole(self.run, self.model), self._evaluated()
        with pytest.raises(KeyError):
            self._fail_inside()
        assert torch.equal(self._evaluated(), before), "no average is left gathered"
        assert_equal(whole(self.run, self.model), weights)

    @torch.no_grad()
    def _evaluated(self) -> Tensor:
        """Return what the model makes of two rows; it leaves weights gathered."""
        found: Tensor = self.model(torch.ones(2, WIDTH))
        return found

    def _fail_inside(self) -> None:
        with self.ema.applied():
            inside = self._evaluated()
            assert_equal(whole(self.run, self.model), self.expected)
            assert torch.equal(self._evaluated(), inside)
            with pytest.raises(StateError, match=r"inside of `with ema\.applied\(\)`; got optimizer\.step"):
                self.optimizer.step()
            raise KeyError


@requires("torch:2.13")
@world(2, quiet=30)
def test_averages_are_those_of_whole_weights() -> None:
    """In copies, shards, splits and stages the average equals torch's of the whole weights; an update sends nothing."""
    for kind in KINDS:
        training = Training(kind)
        training.check()
        for _ in range(3):
            training.step()
        training.check()
        assert training.counts == [0, 0, 0], kind
        with pytest.raises(RankDisagreementError, match=r"the same on all ranks; got, by rank.*\(0, 0\.5"):
            training.run.ema(training.model, 0.5 + 0.1 * training.run.process_index)
        if kind in ("fsdp1", "pp"):
            with pytest.raises(EngineUnavailableError, match="got buffers='average'"):
                training.run.ema(training.model, buffers="average")
        reset_all()
    comm = CommDebugMode()
    with comm:
        dist.all_reduce(torch.ones(1))
    assert comm.get_total_counts() == 1, "the counter sees exchanges"


@requires("torch:2.13")
@world(4, quiet=30)
def test_shards_of_split_layers_are_averaged_on_any_device() -> None:
    """So it is where what tensor parallel leaves each rank is sharded, with averages that are kept where one says."""
    for kind, given in (("fsdp2tp", {}), ("fsdp2tp", {"device": "cpu"}), ("fsdp2", {"device": "cpu"})):
        training = Training(kind, **given)
        for _ in range(2):
            training.step()
        training.check()
        assert training.counts == [0, 0], kind
        reset_all()


@world(2, quiet=30)
def _stopped(place: Path, kind: str) -> None:
    """Train, save, and keep the average to compare with."""
    training = Training(kind, every=2)
    for number in range(3):
        training.step(updates=number == 1)
    training.run.save_state(str(place / "state"))
    training.run.save_model(training.ema, place / "model")
    if training.run.is_main_process:
        torch.save(training.expected, place / "expected.pt")


@world("size", quiet=30)
def _resumed(place: Path, kind: str, size: int) -> None:
    """Go on elsewhere: the average is the one that was saved, and so is the step at which it is updated."""
    training = Training(kind, every=2)
    training.run.load_state(str(place / "state"))
    if training.expected:  # where whole weights are
        training.expected = torch.load(place / "expected.pt")
    training.check()
    training.step()  # an even one
    training.check()
    training.run.wait_for_everyone()
    training.step(updates=False)
    training.run.save_state(str(place / "state"), blocking=False).wait()
    if training.run.is_main_process:
        torch.save(training.expected, place / "expected.pt")


@requires("torch:2.13")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp2", [("fsdp2", 4), ("fsdp2-whole", 2), ("one", 1)]),
        ("pp", [("fsdp1", 2), ("fsdp1-whole", 2), ("tp", 2)]),
    ],
)
def test_an_average_is_resumed_elsewhere(first: str, then: list[tuple[str, int]], tmp_path: Path) -> None:
    """Saved on two ranks, an average goes on in shards on four, under other engines, and in one process."""
    _stopped(tmp_path, first)
    for kind, size in then:
        _resumed(place=tmp_path, kind=kind, size=size)


@requires("torch:2.8")
@world(2, quiet=12, preload=("transformers.modeling_utils",))
def test_an_exported_average_is_loaded_by_transformers(tmp_path: Path) -> None:
    """What `save_model` writes of an average in shards gives, in transformers, what the applied average gave."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, tie_word_embeddings=True, **sizes))
    run = accelerator("fsdp2", "LlamaDecoderLayer")
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ema = run.ema(model, DECAY)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(2):
        advance(model(input_ids=tokens, labels=tokens).loss, optimizer, run=run)
    with torch.no_grad(), ema.applied():
        expected = model(input_ids=tokens).logits
    run.save_model(ema, tmp_path)
    if run.is_main_process:
        model.config.save_pretrained(tmp_path)
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(found(input_ids=tokens).logits, expected)
            trained = model.state_dict()["model.norm.weight"].to_local()
            assert not torch.equal(found.model.norm.weight[: len(trained)], trained), "it is the average"
