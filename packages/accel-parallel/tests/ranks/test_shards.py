"""Checkpoints in shards: bit-equal on any number of ranks and under any strategy, and refused where a part is wrong."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from several_ranks import COPIES, advance, assert_equal
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from accel_core.accelerator import Accelerator
from accel_core.comm.control import Channel
from accel_core.comm.objects import gather_object
from accel_core.errors import CheckpointError
from accel_core.mesh.tensor import local_part
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import reset_all
from accel_parallel.checkpoint.reader import ShardFolder
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 10},
    "copies": {"fsdp_version": 2, "reshard_after_forward": False},
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True, "auto_wrap_policy": "size_based_wrap", "min_num_params": 10},
    "copies1": {"fsdp_version": 1, "use_orig_params": True, "sharding_strategy": "HYBRID_SHARD"},
    "whole1": {"fsdp_version": 1, "use_orig_params": True, "sharding_strategy": "NO_SHARD"},
}
SHARDED = "SHARDED_STATE_DICT"


class Net(nn.Module):
    """A tied weight, buffers, rows that cannot be dealt out evenly, and a weight of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        scores: torch.Tensor = self.head(self.norm(torch.tanh(self.body(self.embed(tokens))))) * self.scale
        return scores


class Trained:
    """A run of one kind.

    Args:
        kind: A key of KINDS, or `plain`.
        layout: How it saves.
        seed: Of its weights.
    """

    def __init__(self, kind: str, layout: str = SHARDED, seed: int = 0) -> None:
        given: dict[str, Any] = {}
        if kind != "plain":
            given["fsdp_plugin"] = FullyShardedDataParallelPlugin(**KINDS[kind], state_dict_type=layout)
        if kind.startswith("copies"):
            given["parallelism_config"] = ParallelismConfig(**COPIES)
        self.accelerator = Accelerator(cpu=True, **given)
        torch.manual_seed(seed)
        self.model: Any = Net()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05 if seed == 0 else 0.5)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def train(self, steps: int) -> list[float]:
        """Take some steps on the same batch on every rank, and return the losses."""
        losses = []
        for _ in range(steps):
            advance(loss := self.model(torch.arange(7)).square().mean(), self.optimizer, run=self.accelerator)
            losses.append(loss.item())
        return losses

    def everything(self) -> dict[str, Any]:
        """Return all weights and moments, whole."""
        strategy: Any = self.accelerator._runtime.strategy
        if hasattr(strategy, "whole_state"):
            state = strategy.whole_state(self.model, keep=True)
            moments = strategy.whole_optimizer(self.optimizer, True)
        else:
            state, moments = self.accelerator.unwrap_model(self.model).state_dict(), self.optimizer.state_dict()
        found = {name: value.detach().clone() for name, value in state.items()}
        for key, entries in moments["state"].items():
            found |= {f"{key}/{name}": torch.as_tensor(value).clone() for name, value in entries.items()}
        return found | {"lr": torch.tensor(moments["param_groups"][0]["lr"])}


@world("ranks")
def go_on(kind: str, place: Path, number: int, ranks: int) -> None:
    """Load what the one before saved, compare, and save; the first notes what it saved and the losses that follow."""
    own = Trained(kind, seed=number)
    if number == 0:
        own.train(3)
    elif number % 2:
        own.train(1)
    if number:
        own.accelerator.load_state(str(place / str(number - 1)))
    own.accelerator.save_state(str(place / str(number)))
    found, losses = own.everything(), own.train(5)
    if number == 0 and own.accelerator.is_main_process:
        torch.save((found, losses), place / "expected.pt")
    if number:
        before, expected = torch.load(place / "expected.pt", weights_only=True)
        assert_equal(found, before)
        # A mean over three ranks of one value is not that value in every bit.
        assert losses == (expected if ranks != 3 else pytest.approx(expected, rel=1e-5))


CHAINS = {
    "fsdp2": (("fsdp2", 4), ("fsdp2", 2), ("plain", 1), ("copies", 4)),
    "fsdp1": (("fsdp1", 4), ("fsdp1", 2), ("fsdp2", 1), ("copies1", 4), ("plain", 2)),
    "across": (("copies", 4), ("fsdp1", 2), ("fsdp2", 3), ("whole1", 2), ("plain", 1)),
}


@pytest.mark.parametrize(
    "chain", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.full("another case of a grid")), "across"]
)
def test_a_run_goes_on_with_other_ranks_and_strategies(chain: str, tmp_path: Path) -> None:
    """Weights and moments are bit-equal on every number of ranks and under every strategy, and so are the losses."""
    for number, (kind, size) in enumerate(CHAINS[chain]):
        go_on(kind=kind, place=tmp_path, number=number, ranks=size)


def failure_of(own: Trained, place: Path) -> str:
    """Return the error of loading, which is the same on all ranks, and make sure that nothing changed."""
    before = own.everything()
    with pytest.raises(CheckpointError) as caught:
        own.accelerator.load_state(str(place))
    texts = gather_object([f"{type(caught.value).__name__}: {caught.value}"])
    assert len(set(texts)) == 1, texts
    assert_equal(own.everything(), before)
    return str(texts[0])


def moments_memory(own: Trained) -> list[int]:
    """Return where the moments of an optimizer lie that this rank holds something of."""
    entries = (local_part(entry[name]) for entry in own.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return [entry.data_ptr() for entry in entries if entry.numel()]


@world(2)
def test_weights_left_whole_by_evaluation_save_and_load(tmp_path: Path) -> None:
    """FSDP1 leaves the root whole after a forward pass alone: its state is the same bit for bit."""
    own = Trained("fsdp1")
    own.train(1)
    before = own.everything()
    own.model.eval()
    for number in range(2):
        with torch.no_grad():
            own.model(torch.arange(7))
        if number == 0:
            own.accelerator.save_state(str(tmp_path / "ckpt"))
            own.model.train()
            own.train(1)
            own.model.eval()
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert_equal(own.everything(), before)


@world(2)
def test_moments_that_are_not_by_element_are_refused(tmp_path: Path) -> None:
    """A state of another size than its parameter is refused by torch on all ranks, and what lies there stays."""
    own = Trained("fsdp1")
    own.train(1)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.accelerator.wait_for_everyone()
    before = {path: path.read_bytes() for path in (tmp_path / "ckpt").rglob("*") if path.is_file()}
    if own.accelerator.is_main_process:
        next(iter(own.optimizer.state.values()))["factors"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match="rank 0: AssertionError"):
        own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.accelerator.wait_for_everyone()  # for the rank that clears what was staged
    assert before == {path: path.read_bytes() for path in (tmp_path / "ckpt").rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@world(2)
def test_torch_reads_what_is_written_in_the_background(kind: str, tmp_path: Path) -> None:
    """A snapshot is saved while training goes on; `dcp.load` reads it, and so does a load straight after a save."""
    own = Trained(kind)
    own.train(2)
    before = own.everything()
    handle: Any = own.accelerator.save_state(str(tmp_path / "ckpt"), blocking=False)
    own.train(1)
    handle.wait()
    state = own.model.state_dict() if kind == "fsdp2" else {name: before[name] for name in Net().state_dict()}
    read = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(read, checkpoint_id=tmp_path / "ckpt" / "pytorch_model_fsdp_0")
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in read["model"].items()}
    assert_equal(whole, {name: before[name] for name in whole})
    memory = moments_memory(own)
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert_equal(own.everything(), before)
    assert kind == "fsdp1" or moments_memory(own) == memory  # torch's loading for version 1 makes new tensors
    own.train(1)
    after = own.everything()
    for blocking in (True, False):
        own.accelerator.save_state(str(tmp_path / "ckpt"), blocking=blocking)
        own.train(1)
        own.accelerator.load_state(str(tmp_path / "ckpt"))
        assert_equal(own.everything(), after)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@world(2)
def test_ranks_send_their_plans_again_only_when_one_changed(kind: str, tmp_path: Path) -> None:
    """Later saves write the values of now; after a change on one rank alone both agree anew, and say what is where."""
    own, planned, told = Trained(kind), list[bool](), list[bool]()
    create, gather = DefaultSavePlanner.create_global_plan, Channel.gather

    def noted(planner: DefaultSavePlanner, plans: Any) -> Any:
        planned.append(True)
        return create(planner, plans)

    def gathered(channel: Channel, value: Any) -> Any:
        told.append(True)
        return gather(channel, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultSavePlanner, "create_global_plan", noted)
        patch.setattr(Channel, "gather", gathered)

        def saved(again: int) -> dict[str, Any]:
            own.train(1)
            found = own.everything()
            own.accelerator.save_state(str(tmp_path / "ckpt"))
            assert (len(planned), len(told)) == (again, again > 0)
            planned.clear()
            told.clear()
            return found

        for again in (2, 0, 0):  # the plans of a model and of an optimizer
            before = saved(again)
        own.train(1)
        own.accelerator.load_state(str(tmp_path / "ckpt"))
        assert_equal(own.everything(), before)
        saved(2)  # a load puts the entries of an optimizer in another order
        saved(0)
        if own.accelerator.process_index:
            own.accelerator._runtime.strategy.format._plans.local = {}  # as a rank whose parts are others now
        saved(2)
        if own.accelerator.process_index:
            own.accelerator._runtime.strategy.format._plans.notes.clear()  # as a rank whose values lie elsewhere now
        own.train(1)
        before = own.everything()
        own.accelerator.save_state(str(tmp_path / "ckpt"))
        assert (len(planned), len(told)) == (0, 1)
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert_equal(own.everything(), before)


@world(2)
def test_a_missing_or_foreign_shard_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """A shard that is gone, of another save, or a list that would run code: one error, with the tensors in it."""
    own = Trained("fsdp2")
    own.train(1)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.train(1)
    own.accelerator.save_state(str(tmp_path / "other"))
    shard = Path("pytorch_model_fsdp_0") / "__1_0.distcp"
    if own.accelerator.is_main_process:
        for name in ("gone", "foreign", "unlisted", "evil"):
            shutil.copytree(tmp_path / "ckpt", tmp_path / name)
        os.unlink(tmp_path / "gone" / shard)
        shutil.copy(tmp_path / "other" / shard, tmp_path / "foreign" / shard)
        for name in ("accel_manifest.json", "accel_progress.json"):
            os.unlink(tmp_path / "unlisted" / name)
        os.unlink(tmp_path / "unlisted" / shard)
        for name in ("accel_manifest.json", "accel_progress.json"):
            os.unlink(tmp_path / "evil" / name)
        (tmp_path / "evil" / shard.with_name(".metadata")).write_bytes(pickle.dumps(os.getpid))
    own.accelerator.wait_for_everyone()
    for name in ("gone", "unlisted"):
        text = failure_of(own, tmp_path / name)
        assert "__1_0.distcp" in text
        assert "model.embed.weight" in text.partition("it holds ")[2]
    assert "model.embed.weight" in failure_of(own, tmp_path / "foreign").partition("it holds ")[2]
    evil = failure_of(own, tmp_path / "evil")
    assert evil.startswith("UnsafeCheckpointError"), evil


@world(2)
def test_several_forms_of_one_model_are_refused(tmp_path: Path) -> None:
    """Where nothing says which of two forms is of the newest save, none is taken."""
    own = Trained("fsdp2")
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    if own.accelerator.is_main_process:
        for name in ("accel_manifest.json", "accel_progress.json"):
            os.unlink(tmp_path / "ckpt" / name)
        torch.save({}, tmp_path / "ckpt" / "pytorch_model_fsdp.bin")
    own.accelerator.wait_for_everyone()
    assert "in several forms" in failure_of(own, tmp_path / "ckpt")


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@world(2)
def test_a_scaler_goes_on_at_its_scale(kind: str, tmp_path: Path) -> None:
    """After a skipped step a run is saved; one at another scale loads it, skips, steps and grows as the first does."""

    def start(scale: float, seed: int) -> tuple[Accelerator, Any, Any]:
        reset_all()
        plugin = FullyShardedDataParallelPlugin(**KINDS[kind], state_dict_type=SHARDED)
        handlers = [GradScalerKwargs(init_scale=scale, growth_interval=2)]
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers, fsdp_plugin=plugin)
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))

    def step(accelerator: Accelerator, net: Any, optimizer: Any, factor: float) -> tuple[Any, ...]:
        loss = net(torch.ones(2, 3) + accelerator.process_index).float().square().sum()
        advance(loss * (factor if accelerator.is_main_process else 1.0), optimizer, run=accelerator)
        scale = accelerator.scaler.get_scale()  # type: ignore[union-attr]
        held = {name: local_part(p.detach()).clone() for name, p in net.named_parameters()}
        return optimizer.step_was_skipped, scale, held, loss.detach()

    first = start(2.0**10, 0)
    assert [step(*first, factor)[:2] for factor in (1.0, math.inf)] == [(False, 2.0**10), (True, 2.0**9)]
    first[0].save_state(str(tmp_path / "ckpt"))
    other = start(2.0**4, 9)
    step(*other, 1.0)
    restored = other[0].load_state(str(tmp_path / "ckpt")).restored
    assert restored.index("scaler") < restored.index("optimizer 0")
    for factor in (math.inf, 1.0, 1.0):
        torch.testing.assert_close(step(*other, factor), step(*first, factor), rtol=0, atol=0)
    assert first[0].scaler.get_scale() == 2.0**9  # type: ignore[union-attr]


@world(2)
def _save_local(place: Path, kind: str) -> None:
    """Save what each rank holds, and load it on as many ranks."""
    own = Trained(kind, "LOCAL_STATE_DICT")
    own.train(2)
    before = own.everything()
    own.accelerator.save_state(str(place))
    own.train(1)
    own.accelerator.load_state(str(place))
    assert_equal(own.everything(), before)


@world("ranks")
def _refuse_local(place: Path, kind: str, words: str, ranks: int) -> None:
    """Load it elsewhere."""
    assert words in failure_of(Trained(kind), place)


def test_pieces_of_ranks_are_bound_to_their_number(tmp_path: Path) -> None:
    """What each rank held is loaded by as many ranks of the same settings; others are told what to do."""
    place = tmp_path / "ckpt"
    _save_local(place, "fsdp1")
    words = "was saved by 2 ranks, each with its own part (LOCAL_STATE_DICT)"
    _refuse_local(place=place, kind="fsdp1", words=words, ranks=1)
    words = "only FSDP version 1 on 2 ranks with the same settings"
    _refuse_local(place=place, kind="fsdp2", words=words, ranks=2)


@world(2)
def test_shards_that_a_save_in_whole_files_replaced_are_gone(tmp_path: Path) -> None:
    """A plain save into the folder of a sharded one leaves no shard that could be taken for its own."""
    own = Trained("fsdp2")
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert ShardFolder(tmp_path / "ckpt", "pytorch_model_fsdp_0").check() == {}
    own.accelerator.wait_for_everyone()
    form: Any = own.accelerator._runtime.strategy.format
    form.kind = "FULL_STATE_DICT"
    own.train(1)
    before = own.everything()
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert not list((tmp_path / "ckpt").rglob("*.distcp"))
    own.train(1)
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert_equal(own.everything(), before)
