"""Pipelines: ranks that hold different blocks train as one process does."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from several_ranks import WIDTH, Block, Net, advance
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_core.accelerator import Accelerator
from accel_core.errors import (
    DataError,
    EngineUnavailableError,
    PreparationError,
    RankDisagreementError,
    RemoteRankError,
    StateError,
    UnsupportedTypeError,
)
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.checkpoint.merge import merge_weights
from accel_parallel.pipeline.kwargs import SCHEDULES, PipelineKwargs
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

pytestmark = requires("torch:2.13")  # pipelines

ROWS, STEPS = 8, 5


class Tied(Net):
    """Eight blocks between a layer in and a layer out, which are tied."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width=width, entry=width, out=width, count=8)
        self.leave.weight = self.enter.weight


def squares(outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss."""
    return (outputs - batch["labels"]).square().mean()


def net() -> Tied:
    """Return the same net on every rank."""
    torch.manual_seed(3)
    return Tied()


def data(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Return batches."""
    drawn = torch.randn(steps, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    return [{"values": values, "labels": labels} for values, labels in drawn]


def alone(model: nn.Module, batches: list[dict[str, Any]], loss_fn: Any = None) -> tuple[dict[str, Any], list[float]]:
    """Return weights and losses of one process that trains on the batches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        loss = model(**batch).loss if loss_fn is None else loss_fn(model(batch["values"]), batch)
        advance(loss, optimizer)
        losses.append(loss.item())
    return model.state_dict(), losses


def staged(pipeline: dict[str, Any], size: int = 2, axes: dict[str, int] | None = None, **given: Any) -> Accelerator:
    """Return a run whose ranks share blocks out."""
    config, handlers = ParallelismConfig(pp_size=size, **(axes or {})), given.pop("kwargs_handlers", [])
    handlers = [PipelineKwargs(**pipeline), *handlers]
    return Accelerator(parallelism_config=config, kwargs_handlers=handlers, cpu=True, **given)


def trained(run: Accelerator, model: nn.Module, optimizer: Any, batches: list[dict[str, Any]]) -> list[float]:
    """Train on batches, and return the losses."""
    losses = []
    for batch in batches:
        advance(loss := model(**batch).loss, optimizer, run=run)
        losses.append(loss.item())
    return losses


def piped(
    model: nn.Module, batches: list[dict[str, Any]], **settings: Any
) -> tuple[dict[str, Any], list[float], Accelerator, nn.Module]:
    """Return weights and losses of ranks that share the model out, the run, and the prepared model."""
    run, model = staged(settings, ensure().size), copy.deepcopy(model)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = trained(run, model, optimizer, batches)
    return run.get_state_dict(model), losses, run, model


def near(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference of weights."""
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.full("another case of a grid"))], ids=lambda each: f"pp{each}"
)
@world("ranks", quiet=24)
def test_every_schedule_trains_as_one_process_does(ranks: int) -> None:
    """Weights after five steps, the first stage's also the last one's, and losses; one to two stages on each rank."""
    wanted, losses = alone(net(), data(), squares)
    for schedule in SCHEDULES:
        # Once, the other rank has no values, and gets those of the first.
        with torch.device("meta" if schedule == "1f1b" and ensure().rank else "cpu"):
            model = net()
        found, own, *_ = piped(model, data(), schedule=schedule, loss_fn=squares)
        assert near(found, wanted) <= 1e-6, schedule
        assert own == pytest.approx(losses, abs=1e-6), schedule


def small(kind: str) -> nn.Module:
    """Return a model of transformers without dropout, the same on every rank."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    own = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=8, n_positions=8, **own, **drops)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    if kind == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = transformers.T5Config(decoder_start_token_id=0, **sizes, **own)
        return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
        return transformers.Qwen3MoeForCausalLM(  # type: ignore[no-any-return]
            transformers.Qwen3MoeConfig(num_hidden_layers=4, **sizes, **own)
        )
    config = transformers.LlamaConfig(num_hidden_layers=4, **sizes, **own)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return batches of tokens, some of which are padding and count for no loss."""
    drawn = torch.randint(2, 11, (STEPS, ROWS, 7), generator=torch.Generator().manual_seed(9))
    masks = (torch.arange(7) < torch.arange(ROWS)[:, None] % 4 + 3).long()
    return [{"input_ids": ids, "attention_mask": masks, "labels": torch.where(masks == 1, ids, -100)} for ids in drawn]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("gpt2", "1f1b"),
        ("t5", "zbv_zero_bubble"),
        pytest.param("llama", "gpipe", marks=pytest.mark.full("another case of a grid")),
        pytest.param("t5", "1f1b", marks=pytest.mark.full("another case of a grid")),
        pytest.param("qwen3_moe", "interleaved_1f1b", marks=pytest.mark.full("another case of a grid")),
    ],
)
@world(2, quiet=20, preload=("transformers.modeling_utils",))
def test_models_of_transformers_train_as_in_one_process(kind: str, schedule: str) -> None:
    """A tied head, rotary angles, an encoder whose output all decoder stages read, experts; labels of padding."""
    wanted, losses = alone(small(kind), sentences())
    everywhere = kind != "t5"
    found, own, _, model = piped(small(kind), sentences(), schedule=schedule, gather_output=everywhere)
    assert near(found, wanted) <= 1e-6, kind
    assert own == pytest.approx(losses, abs=1e-6), kind
    plain = small(kind)
    plain.load_state_dict(found)
    batch = sentences()[0]
    for each in (plain, model):
        each.eval()
    with torch.no_grad():
        outputs, expected = model(**batch), plain(**batch)
    assert type(outputs).__name__ == type(expected).__name__
    if everywhere or ensure().rank == int(schedule != "zbv_zero_bubble"):
        assert torch.allclose(outputs.logits, expected.logits, atol=1e-6), kind
    else:  # the last stage is on the other rank
        assert outputs.logits is None
    assert torch.allclose(outputs.loss, expected.loss, atol=1e-6), kind
    # Five of eight rows: micro-batches differ in size where nothing is trained.
    batch = {name: value[:5] for name, value in batch.items() if name != "labels"}
    if everywhere:
        with torch.no_grad():
            assert torch.allclose(model(**batch).logits, plain(**batch).logits, atol=1e-6), kind


def loop(run: Accelerator, model: nn.Module, **settings: Any) -> tuple[dict[str, Any], list[float]]:
    """Return weights, norms and rates of a loop with accumulation, clipping and a schedule."""
    batches = [tuple(each.values()) for each in data(7)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(torch.cat(each) for each in zip(*batches, strict=True))), batch_size=ROWS
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, rates = run.prepare(model, optimizer, loader, rates)
    seen = []
    for values, labels in loader:
        with run.accumulate(model):
            outputs = model(values, labels=labels) if settings else model(values)
            loss = outputs.loss if settings else squares(outputs, {"labels": labels})
            run.backward(loss)
            if run.sync_gradients:
                seen.append(float(run.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen += run.gather_for_metrics(model(values)).flatten().tolist()[:ROWS]
    return run.get_state_dict(model), [*seen, rates.get_last_lr()[0]]


@world(4, quiet=20)
def test_an_accumulating_clipping_scheduled_loop_runs_unchanged() -> None:
    """Two pipelines of two ranks that average gradients, each of whose batches is half of what one process reads."""
    loading = DataLoaderConfiguration(split_batches=True)
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "dataloader_config": loading}
    run = staged({"loss_fn": squares, "microbatches": 2}, axes={"dp_replicate_size": 2}, **given)
    found, seen = loop(run, net(), piped=True)
    expected, numbers = one_process()
    assert near(found, expected) <= 1e-6
    assert seen == pytest.approx(numbers, abs=1e-5)


def one_process() -> tuple[dict[str, Any], list[float]]:
    """Return what the same loop gives without accel."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    batches = data(7)
    for index, batch in enumerate(batches):
        (squares(model(batch["values"]), batch) / (3 if index < 6 else 1)).backward()
        if index % 3 == 2 or index == len(batches) - 1:
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
    with torch.no_grad():
        seen += model(batches[-1]["values"]).flatten().tolist()[:ROWS]
    return model.state_dict(), [*seen, rates.get_last_lr()[0]]


@world(2, quiet=12)
def test_what_a_pipeline_cannot_run_is_refused_on_all_ranks() -> None:
    """Each message names what is in the way, before anything was computed, and the pipeline goes on afterwards."""
    _, _, run, model = piped(net(), data(1), loss_fn=squares, microbatches=4)
    before = run.get_state_dict(model)
    batch = data(1)[0]
    with pytest.raises(DataError, match=r"4 equal micro-batches.*got 6 rows"):
        model(batch["values"][:6], labels=batch["labels"][:6])
    with pytest.raises(DataError, match="others on Tied"):
        model(**{name: value[: 4 + 4 * ensure().rank] for name, value in batch.items()})
    with pytest.raises(PreparationError, match="layers of its model"):
        model.load_state_dict(before)
    loss = model(**batch).loss
    run.backward(loss)
    with pytest.raises(StateError, match="added once"):
        run.backward(loss)
    with pytest.raises(AttributeError, match="its loss alone"):
        _ = model(**batch).logits
    assert near(run.get_state_dict(model), before) == 0
    model = run.prepare(nn.Sequential(*(Block() for _ in range(3))))
    with pytest.raises(DataError, match="divides each batch"):
        model(torch.ones(3, WIDTH))
    reset_all()
    _, _, run, model = piped(net(), [], loss_fn=squares, gather_output=False)
    with torch.no_grad(), pytest.raises((UnsupportedTypeError, RemoteRankError), match="brings a list; got None"):
        run.gather_for_metrics(model(batch["values"]))  # the first stage has none of it
    reset_all()
    lossless = Accelerator(parallelism_config=ParallelismConfig(pp_size=2), cpu=True)
    for wrong, words in ((nn.Linear(2, 2), "blocks of one class"), (nn.BatchNorm1d(2), "whole batch")):
        with pytest.raises(PreparationError, match=words):
            lossless.prepare(wrong)
    hooked = net()
    hooked.enter.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(PreparationError, match="hooks on, or sparse gradients of, enter"):
        lossless.prepare(hooked)
    with pytest.raises(PreparationError, match="computes the loss; got none from Tied"):
        lossless.prepare(net())(batch["values"])
    reset_all()
    with pytest.raises(EngineUnavailableError, match="fp8"):
        Accelerator(parallelism_config=ParallelismConfig(pp_size=2), mixed_precision="fp8", cpu=True)


class Unlike(nn.Module):
    """Blocks around which a test does what stages would do unlike one process."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, values: torch.Tensor, lengths: object = None) -> torch.Tensor:
        """Return as many numbers for each row."""
        noise = torch.randn_like(values) if "noise" in self.kind else torch.zeros_like(values)
        values = nn.functional.dropout(values + noise, 0.1, self.training)
        for block in self.blocks:
            values = block(values)
        if self.kind == "replaced":
            self.mean = 0.9 * self.mean + values.detach().mean(0)
        elif self.kind == "written":
            self.mean.mul_(0.9).add_(values.detach().mean(0))
        found: torch.Tensor = self.leave(values)
        return found - noise if self.kind == "noise" else found


UNLIKE = {
    "noise": (PreparationError, r"random numbers of its own; .* several stages read, by aten\.randn_like\.default"),
    "replaced": (PreparationError, "got mean, in which forward keeps"),
    "written": (PreparationError, "got mean, in which forward keeps"),
    "learned": (DataError, "an input of Unlike that requires a gradient"),
    "lengths": (DataError, "a list as long as the batch, of 8 times int"),
    "hooked": (
        PreparationError,
        "what the model's forward does, in its shapes and number formats; got others from Unl",
    ),
    "noise for the first stage": None,
}


@world(2, quiet=12)
def test_stages_unlike_one_process_are_refused_on_all_ranks() -> None:
    """Noise for two stages, buffers of one, inputs that train, lists of samples and other outputs; no rank waits."""
    batch = data(1)[0]
    for kind, refusal in UNLIKE.items():
        reset_all()
        _, _, run, model = piped(Unlike(kind), [], loss_fn=squares)
        given: dict[str, Any] = {**batch, "lengths": [*range(ROWS)]} if kind == "lengths" else dict(batch)
        given["values"] = batch["values"].clone().requires_grad_(kind == "learned")
        if kind == "hooked":
            model.register_forward_hook(lambda module, args, outputs: outputs.double())
            given.pop("labels")
        if refusal is None:
            run.backward(model(**given).loss)
            continue
        with torch.set_grad_enabled(kind != "hooked"), pytest.raises((refusal[0], RemoteRankError), match=refusal[1]):
            model(**given)


@world(2, quiet=12)
def test_stages_in_two_number_formats_have_one_norm() -> None:
    """A stage in bfloat16 and one in float32 clip gradients as one process does."""

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__(count=8)
            self.blocks.bfloat16()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.leave(self.run(values.bfloat16()).float())
            return found

    torch.manual_seed(3)
    plain, batch = Mixed(), data(1)[0]
    plain.blocks[4:].requires_grad_(False)
    *_, run, model = piped(plain, [], loss_fn=squares)
    squares(plain(batch["values"]), batch).backward()
    run.backward(model(**batch).loss)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    here = [each for each in model.parameters() if each.grad is not None]  # in one number format on each rank
    assert len({each.dtype for each in here}) == 1
    torch.testing.assert_close(run.clip_grad_norm_(here, 0.1), expected, rtol=0.02, atol=0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=1e-3)


class Raising:
    """A hook of a module that fails at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object) -> None:
        """Count, and fail."""
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("broken")


@world(2, quiet=12)
def test_an_error_inside_one_stage_ends_the_step_on_all_ranks() -> None:
    """In any pass and in the loss: no rank waits, no weight changes, and the next step runs."""
    batch = data(1)[0]
    for schedule in SCHEDULES:
        _, _, run, model = piped(net(), data(1), schedule=schedule, loss_fn=squares, microbatches=4)
        before = run.get_state_dict(model)
        first = model.blocks[0].layer  # on rank 0; the second block of the last rank's first stage is on rank 1
        second = model.blocks[6 if schedule in ("gpipe", "1f1b") else 2].layer
        for rank, module in enumerate((first, second)):
            for hooked in ("register_forward_pre_hook", "register_full_backward_hook", "without gradients"):
                evaluates = hooked == "without gradients"
                handle = getattr(module, "register_forward_pre_hook" if evaluates else hooked)(Raising())
                error, words = ZeroDivisionError, "^broken$"
                if ensure().rank != rank:
                    error, words = RemoteRankError, f"error on rank {rank}: ZeroDivisionError: broken"
                with torch.set_grad_enabled(not evaluates), pytest.raises(error, match=words):
                    model(**batch)
                handle.remove()
                assert all(each.grad is None for each in model.parameters())
        assert near(run.get_state_dict(model), before) == 0
        run.backward(model(**batch).loss)
        reset_all()

    def fails(outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        raise KeyError("labels of a batch")

    error = KeyError if ensure().rank else RemoteRankError
    with pytest.raises(error, match="labels of a batch"):
        piped(net(), data(1), loss_fn=fails)


class Memory(TorchDispatchMode):
    """Remembers how many bytes of tensors, made while it is on, there were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta:
                self.made[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        self.made = {storage: size for storage, size in self.made.items() if not storage.expired()}
        self.most = max(self.most, sum(self.made.values()))
        return result


@world(2, quiet=12, preload=("transformers.modeling_utils",))
def test_a_meta_model_gets_memory_for_its_own_stage_alone() -> None:
    """No rank ever has memory for more; each loads what it holds, and trains as one process; before, a loss is NaN."""
    run = staged({"loss_fn": squares})
    with torch.device("meta"):
        model = Tied(width=256)
    whole, blocks = (sum(each.nbytes for each in part.parameters()) for part in (model, model.blocks))
    with Memory() as memory:
        model = run.prepare(model)
    # Layers outside of blocks are needed where a batch shows it.
    assert held(model) == whole - blocks // 2
    assert held(model) <= memory.most <= 1.1 * held(model)  # and buffers of what ranks tell each other
    assert model(torch.ones(ROWS, 256), labels=torch.ones(ROWS, 256)).loss.isnan()
    with pytest.raises(PreparationError, match="places on the meta device"):
        run.prepare(nn.Sequential(*(Noted() for _ in range(2))).to("meta"))
    reset_all()
    # Of a model of transformers it is known in prepare: here both ranks have the tied embedding.
    start = small("gpt2")
    wanted, losses = alone(start, sentences())
    run = Accelerator(parallelism_config=ParallelismConfig(pp_size=2), cpu=True)
    with torch.device("meta"):
        model = type(start)(start.config)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    outside = ("wte.weight", "ln_f.weight", "ln_f.bias") if ensure().rank else ("wte.weight", "wpe.weight")
    glue = sum(start.transformer.get_parameter(name).nbytes for name in outside)
    assert held(model) == glue + sum(each.nbytes for each in start.transformer.h.parameters()) // 2
    state = start.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()}, strict=False)
    assert trained(run, model, optimizer, sentences()) == pytest.approx(losses, abs=1e-6)
    assert near(run.get_state_dict(model), wanted) <= 1e-6


def held(model: nn.Module) -> int:
    """Return the bytes of parameters that have memory here."""
    return sum(each.nbytes for each in model.parameters() if each.untyped_storage().nbytes() == each.nbytes)


class Noted(Block):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(3), persistent=False)


@world("size")
def _resumed(place: Path, losses: list[float], kind: str, size: int) -> None:
    """Continue from a checkpoint on other ranks, and save again."""
    # What reads its stages alone needs no memory before.
    with torch.device("meta" if kind == "stages" else "cpu"), torch.no_grad():
        model = net()
        for each in model.parameters():
            each.zero_()
    given: dict[str, Any] = {}
    if kind == "stages":
        given = {"parallelism_config": ParallelismConfig(pp_size=ensure().size)}
        given["kwargs_handlers"] = [PipelineKwargs(loss_fn=squares, split=["blocks.2"])]
    if kind == "fsdp":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    run = Accelerator(cpu=True, **given)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    run.load_state(place)
    found = []
    for batch in data()[2:]:
        loss = model(**batch).loss if kind == "stages" else squares(model(batch["values"]), batch)
        advance(loss, optimizer, run=run)
        found.append(loss.item())
    assert found == pytest.approx(losses[2:], abs=1e-6), kind
    run.save_state(place.parent / f"{place.name}-{kind}")


@world("ranks")
def _stopped(place: Path, ranks: int) -> None:
    """Train two steps in a pipeline, save, and look at what a rank holds."""
    _, _, run, model = piped(net(), data(2), loss_fn=squares)
    run.save_state(place / "first")
    run.save_model(model, place / "model")
    saved = load_file(place / "model" / "model.safetensors")
    whole = run.get_state_dict(model)
    assert all(torch.equal(saved.get(name, whole[name]), value) for name, value in whole.items())
    assert saved.keys() | {"leave.weight", "enter.weight"} == whole.keys()
    held = {id(each) for each in model.parameters() if each.untyped_storage().nbytes() == each.nbytes}
    assert len(held) < len(list(model.parameters()))
    assert {id(each) for each in run._optimizers[0].optimizer.state} == held


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full("another case of a grid"))])
def test_checkpoints_of_stages_continue_on_other_layouts(tmp_path: Path, ranks: int) -> None:
    """Losses after a checkpoint of stages are those of a run that was never stopped, wherever it goes on."""
    _, losses = alone(net(), data(), squares)
    _stopped(place=tmp_path, ranks=ranks)
    for kind, size in (("stages", 2), ("whole", 1), ("fsdp", 2)):
        _resumed(place=tmp_path / "first", losses=losses, kind=kind, size=size)
    assert near(*(merged(tmp_path / f"first-{kind}") for kind in ("stages", "fsdp"))) <= 1e-6


@world(4, quiet=20)
def test_a_middle_stage_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """Stages in the middle send and receive more than the first and the last, in training and in evaluation."""
    *_, run, model = piped(net(), data(1), loss_fn=squares)
    middle = 0 < run.process_index < 3
    time.sleep(0.3 * middle)
    run.save_state(tmp_path / "trained")
    with torch.no_grad():
        model(data(1)[0]["values"])
    time.sleep(0.3 * middle)
    run.save_state(tmp_path / "evaluated")
    # A rank that calls alone still learns that the others have gone on.
    if run.process_index == 0:
        with pytest.raises(RankDisagreementError, match="ranks 1, 2, 3 did not come within 1 s"):
            run.save_state(tmp_path / "alone", timeout=1)
    model(**data(1)[0])


def merged(place: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder of shards."""
    merge_weights(place / "pytorch_model_fsdp_0", place / "merged")
    return load_file(place / "merged" / "model.safetensors")


@world(4, quiet=20)
def test_fsdp_sharded_stages_train_and_save_as_one_process(tmp_path: Path) -> None:
    """Two stages, each sharded over two ranks that read different halves; clipped, recomputed, saved and loaded."""
    pipeline = {"loss_fn": squares, "microbatches": 2}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    loading = DataLoaderConfiguration(split_batches=True)
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "dataloader_config": loading}
    run = staged(pipeline, axes={"dp_shard_size": 2}, fsdp_plugin=plugin, **given)
    found, seen = loop(run, net(), piped=True)
    expected, numbers = one_process()
    assert near(found, expected) <= 1e-6
    assert seen == pytest.approx(numbers, abs=1e-5)
    (model,) = run._models
    assert sum(isinstance(each, DTensor) for each in model.parameters()) == len(list(model.blocks.parameters())) // 2
    run.save_state(tmp_path)
    with torch.no_grad():
        for each in model.parameters():
            if isinstance(each, DTensor):
                each.zero_()
    run.load_state(tmp_path)
    assert near(run.get_state_dict(model), expected) <= 1e-6
    # From the meta device each rank makes its shards of its stage alone, and reads them.
    reset_all()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    run = staged(pipeline, axes={"dp_shard_size": 2}, fsdp_plugin=plugin)
    with torch.device("meta"):
        model = net()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert model(**data(1)[0]).loss.isnan()
    run.load_state(tmp_path)
    assert near(run.get_state_dict(model), expected) <= 1e-6


@world(2, quiet=12)
def test_in_fp16_all_stages_scale_and_skip_together() -> None:
    """Gradients as small as fp16 loses are kept; where they overflow, no rank changes its weights."""
    scaler = [GradScalerKwargs(init_scale=2.0**16)]
    run = staged({"loss_fn": small_squares, "microbatches": 2}, kwargs_handlers=scaler, mixed_precision="fp16")
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e5))
    batch = data(1)[0]
    start = run.get_state_dict(model)
    norm = advance(model(**batch).loss, optimizer, run=run, model=model, clip=1.0)
    plain = net()
    small_squares(plain(batch["values"]), batch).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert norm == pytest.approx(float(wanted), rel=1e-2)
    assert near(run.get_state_dict(model), start) > 0
    before, scale = run.get_state_dict(model), run.scaler.get_scale()
    batch["labels"] = batch["labels"] * 1e30  # the loss of the last stage, and every gradient, overflows
    run.backward(model(**batch).loss)
    optimizer.step()
    assert run.optimizer_step_was_skipped
    assert run.scaler.get_scale() < scale
    assert near(run.get_state_dict(model), before) == 0


def small_squares(outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return a loss whose gradients are below what fp16 can hold."""
    return squares(outputs, batch) * 1e-8


@world(2, quiet=12, preload=("transformers.modeling_utils",))
def test_half_precision_frozen_blocks_and_recomputation() -> None:
    """In bf16 losses are those of one process in bf16; what is frozen stays, and recomputed blocks change nothing."""
    pytest.importorskip("transformers")
    batches = sentences()[:3]
    found = []
    for kind in ("plain", "recomputed", "frozen"):
        model = small("llama")
        if kind == "recomputed":
            model.gradient_checkpointing_enable()
        if kind == "frozen":
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[:2].requires_grad_(False)
        run = staged({"microbatches": 2, "split": ["model.layers.2"]}, mixed_precision="bf16")
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        found.append(trained(run, model, optimizer, batches))
        with pytest.raises(EngineUnavailableError, match="does not generate"):
            model.generate(batches[0]["input_ids"])
        state = run.get_state_dict(model)
        start = small("llama").state_dict()
        same = [name for name in start if torch.equal(start[name], state[name])]
        assert bool(same) == (kind == "frozen"), same
        reset_all()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # else the weights of the first step stay
        _, losses = alone(small("llama"), batches)
    assert found[0] == found[1] == pytest.approx(losses, rel=2e-3)
