"""Models of which every rank holds a part: saved and loaded through a toy format, and through the plain one."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Sharded, assert_equal, everything
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import manifest, tensor_file, weights
from accel_core.checkpoint.format import CheckpointFormat, FilePart, Part, Run, SaveRequest, Source
from accel_core.checkpoint.formats import register_format
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.report import Restoration
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.checkpoint.staging import Buffers
from accel_core.comm.objects import gather_object
from accel_core.errors import AccelError, CheckpointError, CheckpointMismatchError, RankDisagreementError
from accel_core.host.environ import patch_environment
from accel_core.mesh.tensor import fill, local_part, placed_like
from accel_core.options.enums import DistributedType
from accel_core.process.world import ensure
from accel_core.strategies.registry import register_strategy
from accel_core.strategies.strategy import Strategy
from accel_testing import requires, world

PLAN = "toy_plan.json"
SHARDS = requires("torch:2.8")  # the first that computes in shards on a CPU


class ToyFormat:
    """One file for each rank, with the rows that it holds, and a plan that one of them writes."""

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return nothing: models are written by this format."""
        return []

    def parts(self, request: SaveRequest) -> list[Part]:
        """Agree on who holds which rows, and return this rank's."""
        run = request.run
        assert request.weights == []
        own = {f"model/{name}": value for name, value in run.models[0].state_dict().items()}
        for key, entries in run.optimizers[0].state_dict()["state"].items():
            own |= {f"optimizer/{key}/{name}": value for name, value in entries.items()}
        held = request.exchange([name for name, value in own.items() if local_part(value).numel()])
        return [RankPart(own), FilePart(PLAN, "json", held)] if request.writes else [RankPart(own)]

    def recognises(self, source: Source) -> bool:
        """Return whether there is a plan."""
        return PLAN in source.files()

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return a rank's own file where as many ranks load as have saved."""
        others = {file_of(other) for other in range(source.world_size) if other != rank and size == source.world_size}
        return [name for name in source.files() if name not in others]

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Fill the model from the rows of all ranks."""

        def apply() -> None:
            for name, value in models[0].state_dict().items():
                fill(value, read_whole(source, f"model/{name}"))

        return [Restoration("model 0", apply)]

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Fill the optimizer from the rows of all ranks."""

        def apply() -> None:
            state = run.optimizers[0].state_dict()
            owners = [own for group in run.optimizers[0].param_groups for own in group["params"]]
            names = {name for held in manifest.read_json(source.folder, PLAN) for name in held}
            for key, own in enumerate(owners):
                mine = [name for name in names if name.startswith(f"optimizer/{key}/")]
                entries = {name.rpartition("/")[2]: read_whole(source, name) for name in mine}
                state["state"][key] = {name: placed_like(value, own) for name, value in entries.items()}
            run.optimizers[0].load_state_dict(state)

        return [Restoration("optimizer 0", apply)]


class RankPart:
    """The rows that a rank holds."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write them into a folder of their own."""
        content = {name: local_part(value) for name, value in self.content.items()}
        return FilePart(file_of(rank), "tensors", content).write(folder, rank)

    def snapshot(self, buffers: Buffers) -> RankPart:
        """Copy them."""
        return RankPart(buffers.copy(self.content, "toy"))


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"toy/rank_{rank}.safetensors"


def read_whole(source: Source, name: str) -> torch.Tensor:
    """Put the rows of all ranks together."""
    held = manifest.read_json(source.folder, PLAN)
    found = [
        tensor_file.TensorFile(source.folder, file_of(rank)).read(name)
        for rank, names in enumerate(held)
        if name in names
    ]
    return torch.cat(found) if found[0].dim() else found[0]


TOY: CheckpointFormat = ToyFormat()


class ToyStrategy(Strategy):
    """Every rank holds the rows of each parameter that fall to it."""

    name = "toy"
    format = TOY

    def label(self) -> DistributedType:
        """Return the label of data parallel, for want of another."""
        return self.world.hardware.label

    def distribute(self, model: nn.Module) -> nn.Module:
        """Shard in place."""
        return fully_shard(model, mesh=init_device_mesh("cpu", (self.world.size,)))


class Tied(nn.Module):
    """A model with a tied weight, more rows than can be dealt out evenly, and a weight of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        scored: torch.Tensor = self.head(torch.tanh(self.body(self.embed(tokens)))) * self.scale
        return scored


def build(seed: int, *, sharded: bool = True) -> BareRun:
    """Return a run after a step, its model sharded over all ranks or whole."""
    torch.manual_seed(seed)
    here, model = ensure(), Tied()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (here.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    own = BareRun([model], [optimizer], step=seed)
    if sharded:
        own.strategy = Sharded(TOY)
    return own


def failure_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the error of a call, which is the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        call(*args, **kwargs)
    texts = gather_object([f"{type(caught.value).__name__}: {caught.value}"])
    assert len(set(texts)) == 1, texts
    return str(texts[0])


@world("ranks")
def _load_elsewhere(place: Path, ranks: int, expected: dict[str, Any]) -> None:
    """Load into a sharded model, or into a whole one whose strategy has the plain format."""
    register_format(TOY)
    own = build(9, sharded=ranks > 1)
    report = load_state(own, place)
    assert set(report.restored) >= {"model 0", "optimizer 0"}
    assert_equal(everything(own), expected)


@world(2)
def _save_twice(place: Path) -> None:
    """Save, in the foreground and in the background, and load on as many ranks."""
    own = build(1)
    before = everything(own)
    save_state(own, place / "ckpt")
    handle = save_state(own, place / "later", blocking=False)
    with torch.no_grad():
        for parameter in own.models[0].parameters():
            local_part(parameter).add_(1)
    handle.wait()
    assert sorted(os.listdir(place / "ckpt" / "toy")) == ["rank_0.safetensors", "rank_1.safetensors"]
    for name in ("ckpt", "later"):
        other = build(2)
        load_state(other, place / name)
        assert_equal(everything(other), before)
        assert isinstance(other.models[0].body.weight, DTensor)
    if own.world.rank == 0:
        torch.save(before, place / "expected.pt")


@SHARDS
def test_parts_are_saved_and_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Weights and moments of sharded models come back bit-equal, on three ranks and into a plain model on one."""
    _save_twice(tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for name, size in (("ckpt", 3), ("ckpt", 1), ("later", 1)):
        _load_elsewhere(place=tmp_path / name, ranks=size, expected=expected)


@SHARDS
@world(2)
def test_a_rank_checks_only_the_files_that_it_reads(tmp_path: Path) -> None:
    """Of a checkpoint of as many ranks, a machine compares no other machine's part, and none's random states."""
    own = build(1)
    save_state(own, tmp_path / "ckpt")
    looked_at: set[str] = set()
    damages = Manifest.damages

    def watched(self: Manifest, place: Path, only: Any = None, *, contents: bool = True) -> dict[str, str]:
        if contents:
            looked_at.update(only)
        return damages(self, place, only, contents=contents)

    own.world = replace(own.world, local_rank=0, local_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "damages", watched)
        load_state(own, tmp_path / "ckpt")
    rank = own.world.rank
    assert looked_at == {"accel_progress.json", PLAN, file_of(rank), f"random_states_{rank}.pkl"}
    harmed = tmp_path / "ckpt" / file_of(1)
    if rank == 0:
        harmed.write_bytes(b"x" * harmed.stat().st_size)
    ensure()
    gather_object([None])
    assert "rank_1.safetensors has checksum" in failure_of(load_state, own, tmp_path / "ckpt").replace("' ", " ")


@SHARDS
@world(2)
def test_a_plain_checkpoint_is_loaded_into_parts(tmp_path: Path) -> None:
    """Each rank takes its slices of whole weights and moments; what does not fit is refused, and nothing changed."""
    whole = build(1, sharded=False)
    save_state(whole, tmp_path / "ckpt")
    own = build(2)
    load_state(own, tmp_path / "ckpt")
    assert_equal(everything(own), everything(whole))
    assert isinstance(own.optimizers[0].state[own.models[0].body.weight]["exp_avg"], DTensor)
    other = build(3)
    other.models[0].body = nn.Linear(2, 2)
    before = everything(other)
    assert "body.weight has shape (3, 3) instead of (2, 2)" in failure_of(load_state, other, tmp_path / "ckpt")
    assert_equal(everything(other), before)


@requires("accel_deepspeed")  # which says so of its folder, and is asked for where it is missing
@world(2)
def test_what_no_format_recognizes_is_refused_by_name(tmp_path: Path) -> None:
    """A folder as an engine of Accelerate writes it, while no strategy here reads such: what is there is listed."""
    own = build(1, sharded=False)
    if own.world.rank == 0:
        (tmp_path / "ckpt" / "pytorch_model").mkdir(parents=True)
        for name in ("pytorch_model/mp_rank_00_model_states.pt", "random_states_0.pkl"):
            (tmp_path / "ckpt" / name).write_text(name)
    gather_object([None])
    text = failure_of(load_state, own, tmp_path / "ckpt")
    assert text.startswith(CheckpointMismatchError.__name__)
    assert "written by DeepSpeed; got pytorch_model/, random_states_0.pkl" in text


@SHARDS
@world(2)
def test_a_failure_while_ranks_plan_is_the_error_of_all(tmp_path: Path) -> None:
    """One rank fails before it exchanges, or exchanges more often: an error on both, and both can go on."""

    class Failing(ToyFormat):
        def parts(self, request: SaveRequest) -> list[Part]:
            if request.run.world.rank == 1:
                raise ValueError("no plan")
            return super().parts(request)

    class Longer(ToyFormat):
        def parts(self, request: SaveRequest) -> list[Part]:
            if request.run.world.rank == 1:
                request.exchange([])
            return super().parts(request)

    own = build(1)
    own.strategy = Sharded(Failing())
    assert "rank 1: ValueError: no plan" in failure_of(save_state, own, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == []
    own.strategy = Sharded(Longer())
    with pytest.raises(RankDisagreementError, match="called save_state with different data"):
        save_state(own, tmp_path / "ckpt")
    gather_object([None])
    own.strategy = Sharded(TOY)
    save_state(own, tmp_path / "ckpt")


@SHARDS
@world(2)
def test_a_part_has_to_list_what_it_writes(tmp_path: Path) -> None:
    """A file that no part lists, or that none wrote: an error that names it, and the checkpoint before stands."""

    class Silent(RankPart):
        def write(self, folder: Path, rank: int) -> list[Entry]:
            return super().write(folder, rank)[:rank]

    class Forgetful(RankPart):
        def write(self, folder: Path, rank: int) -> list[Entry]:
            return [*super().write(folder, rank), Entry(f"lost_{rank}", 1, "", rank)]

    own = build(1)
    save_state(own, tmp_path / "ckpt")
    before = everything(own)
    for kind, words in ((Silent, "got ['toy/rank_0.safetensors'] that no part"), (Forgetful, "'lost_1'] that none")):
        form = ToyFormat()
        form.parts = lambda request, kind=kind: [kind({"a": torch.ones(2)})]  # type: ignore[method-assign]
        own.strategy = Sharded(form)
        text = failure_of(save_state, own, tmp_path / "ckpt")
        assert words in text, text
    other = build(2)
    load_state(other, tmp_path / "ckpt")
    assert_equal(everything(other), before)


@SHARDS
@world(2)
def test_a_plain_format_refuses_parts_of_tensors(tmp_path: Path) -> None:
    """A strategy that keeps the plain format though its optimizers are sharded cannot save a part as if it were all."""
    own = build(1)

    class Gathering(Sharded):
        def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
            return {name: value.full_tensor() for name, value in model.state_dict().items()}

    own.strategy = Gathering(BareRun().strategy.format)
    assert "other ranks hold too in optimizer 0" in failure_of(save_state, own, tmp_path / "ckpt")
    own.optimizers.clear()
    save_state(own, tmp_path / "ckpt")


@pytest.mark.parametrize("safe", [True, False])
@world(2)
def test_only_the_rank_that_writes_keeps_whole_weights(safe: bool, tmp_path: Path) -> None:
    """`save_model` gathers each weight once, and drops it before the next; what is written is the plain model."""
    register_strategy(ToyStrategy)
    torch.manual_seed(3)
    expected = Tied()
    with patch_environment(ACCELERATE_STRATEGY="toy"):
        accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = accelerator.prepare(Tied())
    gathered: list[weakref.ref[torch.Tensor]] = []
    most = 0
    gather = weights.whole_on_first

    def counted(value: torch.Tensor) -> torch.Tensor:
        nonlocal most
        whole = gather(value)
        assert accelerator.is_main_process or whole.nbytes < value.nbytes
        gathered.append(weakref.ref(whole))
        gc.collect()
        most = max(most, sum(reference() is not None for reference in gathered))
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "whole_on_first", counted)
        accelerator.save_model(model, tmp_path / "model", max_shard_size=70, safe_serialization=safe)
    assert len(gathered) == 4  # the tied weight once
    assert most == 1 if safe or not accelerator.is_main_process else most <= 2
    accelerator.wait_for_everyone()
    bare = Tied()
    weights.load_model(bare, tmp_path / "model")
    assert_equal(dict(bare.state_dict()), dict(expected.state_dict()))
    assert_equal(accelerator.get_state_dict(model), dict(expected.state_dict()))
    weights.load_model(model, tmp_path / "model")


@SHARDS
@world(2)
def test_a_rank_that_cannot_write_goes_on_gathering(tmp_path: Path) -> None:
    """The disk is full after the first weight: both ranks raise the same, none waits, and the old weights stand."""
    own = build(1)
    weights.save_model(own.models[0], None, tmp_path / "model")
    before = everything(own)
    other, written = build(2), []
    stream = tensor_file.memory_of

    def full(tensor: torch.Tensor) -> memoryview:
        written.append(tensor)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        return stream(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "memory_of", full)
        text = failure_of(weights.save_model, other.models[0], None, tmp_path / "model")
    assert "rank 0: Weights could not be written" in text
    assert len(written) == (2 if own.world.rank == 0 else 0)
    bare = Tied()
    weights.load_model(bare, tmp_path / "model")
    assert_equal(dict(bare.state_dict()), {name: before[name] for name in bare.state_dict()})
    with pytest.raises(AccelError):
        weights.save_model(other.models[0], None, tmp_path / "model" / "model.safetensors")
