"""Models in engines of DeepSpeed, against one process."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import math
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.format import FilePart
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.names import LISTS_NAME, MANIFEST_NAME
from accel_core.checkpoint.weights import load_model
from accel_core.errors import (
    CheckpointError,
    ConfigurationError,
    EngineUnavailableError,
    PreparationError,
    StateError,
)
from accel_core.host import availability
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import MeterKwargs
from accel_core.state import AcceleratorState, reset_all
from accel_deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_deepspeed.strategy import DeepSpeedStrategy
from accel_testing import requires, world
from accel_testing.conformance.strategy import Case, StrategyConformance, model, plain, samples, train
from accel_testing.world import run

pytestmark = requires("deepspeed")

BATCH = 2


def plugin(stage: int, of_zero: dict[str, Any] | None = None, **others: Any) -> DeepSpeedPlugin:
    """Return a plugin that gathers whole weights."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **(of_zero or {})}
    waiting = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": "auto"}
    return DeepSpeedPlugin(hf_ds_config={**waiting, "zero_optimization": zero, **others})


def begin() -> None:
    """Let DeepSpeed call what torch.distributed deprecates, and keep the drop-in's defaults out of the run.

    Plugins import transformers where it is installed, which imports the drop-in, which changes the defaults of the
    process. The ranks of a test are processes of their own.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if availability.is_transformers_available():
        importlib.import_module("transformers.integrations.deepspeed")
    GradientAccumulationPlugin.default_short_window = "actual"


def run_of(stage: int, of_zero: dict[str, Any] | None = None, **arguments: Any) -> Accelerator:
    """Begin a run of a stage."""
    begin()
    return Accelerator(cpu=True, deepspeed_plugin=plugin(stage, of_zero), **arguments)


def runs(settings: Iterable[tuple[int, dict[str, Any]]], **arguments: Any) -> Iterator[tuple[int, Accelerator]]:
    """Begin a run for each stage and its settings, one after the other."""
    for stage, of_zero in settings:
        yield stage, run_of(stage, of_zero, **arguments)
        reset_all()


def step(*optimizers: Any) -> None:
    """Make a step, and drop the gradients."""
    for each in optimizers:
        each.step()
        each.zero_grad()


class Zero(StrategyConformance):
    """A stage: from 1 on states of optimizers are in parts, from 2 on gradients, and in 3 parameters too."""

    strategy = DeepSpeedStrategy
    sizes = ()  # all on two ranks that import DeepSpeed once, by the test below
    clips_elements = False
    dtype = torch.float
    optimizers_follow = False
    state_everywhere = False
    stage = 2

    def arguments(self) -> dict[str, Any]:
        """Return a plugin."""
        return {"deepspeed_plugin": plugin(self.stage)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2, quiet=30)
def test_every_stage_equals_one_process(stage: int, tmp_path: Path) -> None:
    """Accumulated, cut short, clipped and weighted, every stage trains as one process, and refuses what it cannot."""
    begin()
    conformance = Zero()
    conformance.stage = stage
    conformance._everything(tmp_path, without=("data_is_read_once", "dispatched_data_is_read_once"))


class Compiled(Zero):
    """An engine whose model is compiled whole."""

    def arguments(self) -> dict[str, Any]:
        """Return a plugin, and one that compiles."""
        return {**super().arguments(), "dynamo_plugin": TorchDynamoPlugin(backend="eager")}


@pytest.mark.parametrize("stage", [2, 3])
@world(2, quiet=30)
def test_compiled_engines_equal_one_process(stage: int) -> None:
    """A model that is compiled whole inside its engine trains as one process does."""
    begin()
    conformance = Compiled()
    conformance.stage = stage
    before = torch._dynamo.utils.counters["frames"]["ok"]
    conformance._equals_one_process(Case(accumulation=2, clip=0.05))
    assert torch._dynamo.utils.counters["frames"]["ok"] > before


HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose states show a wrong gradient."""
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("stage", [2, 3])
@world(2, quiet=30)
def test_states_on_the_host_are_stepped_by_deepspeed(stage: int) -> None:
    """Offloaded, AdamW becomes DeepSpeedCPUAdam, and accumulated, clipped and weighted it trains as one process."""
    for case in (Case(accumulation=3, clip=0.05), Case(weighted=True, accumulation=2)):
        accelerator = run_of(stage, HOST, gradient_accumulation_steps=case.accumulation)
        data, expected = samples(8 * BATCH, torch.float), model(dtype=torch.float)
        norms = plain(expected, adam(expected), data, 2 * BATCH, case, epochs=2)
        net = model(dtype=torch.float)
        net, optimizer, loader = accelerator.prepare(net, adam(net), DataLoader(data, batch_size=BATCH))
        assert type(optimizer.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
        found = train(accelerator, net, optimizer, loader, case, epochs=2)
        torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-6)
        equals(accelerator, net, expected)
        reset_all()


def equals(accelerator: Accelerator, net: nn.Module, expected: nn.Module) -> None:
    """Compare a prepared model's whole weights with those of a plain one, on the first rank."""
    state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)
    accelerator.wait_for_everyone()


def student_and_teacher(data: Any, *seeds: int) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return a run that trains a model in stage 2 and reads another in stage 3."""
    plugins = {"student": plugin(2), "teacher": plugin(3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    net, teacher = (model(seed, torch.float) for seed in seeds)
    net, optimizer, loader = accelerator.prepare(net, adam(net), DataLoader(data, batch_size=BATCH))
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is plugins["teacher"]
    return accelerator, net, optimizer, loader, accelerator.prepare(teacher)


@world(2, quiet=30)
def test_one_plugin_trains_while_another_reads(tmp_path: Path) -> None:
    """A student in stage 2 learns what a teacher in stage 3 says, as on one process; both are saved and restored."""
    begin()
    data = samples(8 * BATCH, torch.float)
    expected, said = model(dtype=torch.float), model(5, torch.float)
    optimizer = adam(expected)
    for start in range(0, len(data), 2 * BATCH):
        x = data[start : start + 2 * BATCH][0]
        (expected(x) - said(x).detach()).square().mean().backward()
        step(optimizer)
    accelerator, net, optimizer, loader, teacher = student_and_teacher(data, 3, 5)
    assert (net.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
    assert accelerator.deepspeed_engine_wrapped.engine is net
    for x, *_ in loader:
        with torch.no_grad():
            wanted = teacher(x)
        accelerator.backward((net(x) - wanted).square().mean())
        step(optimizer)
    equals(accelerator, net, expected)
    accelerator.save_state(tmp_path / "state")
    reset_all()
    accelerator, net, _, _, teacher = student_and_teacher(data, 11, 12)
    accelerator.load_state(tmp_path / "state")
    equals(accelerator, net, expected)
    equals(accelerator, teacher, said)
    torch.testing.assert_close(teacher(x), said(x))


@world(2, quiet=30)
def test_a_loss_finds_its_engine() -> None:
    """Of two models that train, each loss finds its own; one of both or none, and a second optimizer, are refused."""
    accelerator = run_of(2)
    plains = [model(seed, torch.float) for seed in (3, 5)]
    pairs = [accelerator.prepare(net, adam(net)) for net in (model(seed, torch.float) for seed in (3, 5))]
    (first, _), (second, _) = pairs
    x = samples(BATCH, torch.float)[:][0]
    with pytest.raises(PreparationError, match="got one that comes from 2"):
        accelerator.backward((first(x) + second(x)).mean())
    with pytest.raises(StateError, match="leads to none of the 2 engines"):
        accelerator.backward(plains[0](x).mean())
    plains[0].zero_grad()
    for bare, (net, optimizer) in zip(plains, pairs, strict=True):
        accelerator.backward(net(x).square().mean())
        step(optimizer)
        own = adam(bare)
        bare(x).square().mean().backward()
        own.step()
        equals(accelerator, net, bare)
    bare = accelerator.unwrap_model(first)
    bare.append(torch.nn.Linear(2, 2))
    accelerator.free_memory()
    for again in (bare, first):
        with pytest.raises(PreparationError, match="got AdamW, which trains 0 of 0 new models"):
            accelerator.prepare(again, torch.optim.AdamW(again.parameters()))
    assert (accelerator._models, accelerator._optimizers) == ([], [])


EVERYWHERE: tuple[tuple[int, dict[str, Any]], ...] = (
    (0, {}),
    (1, {}),
    (2, {}),
    (3, {"stage3_param_persistence_threshold": 0}),
    (2, HOST),
    (3, HOST | {"offload_param": {"device": "cpu", "pin_memory": False}}),
)


@world(2, quiet=30)
def test_losses_of_one_batch_add_up() -> None:
    """Several backward passes count as their sum, and zero_grad drops all; stage 3 refuses two of one forward pass."""
    for number, (stage, accelerator) in enumerate(runs(EVERYWHERE)):
        data, expected = samples(6 * BATCH, torch.float), model(dtype=torch.float)
        net = model(dtype=torch.float)
        net, optimizer, loader = accelerator.prepare(net, adam(net), DataLoader(data, batch_size=BATCH))
        own = adam(expected)
        for batch, (x, y, _) in enumerate(loader):
            rows = slice(batch * 2 * BATCH, (batch + 1) * 2 * BATCH)
            several_losses(net, x, y, accelerator.backward, once=stage == 3)
            several_losses(expected, *data[rows][:2], torch.Tensor.backward, once=False)
            if batch != 1:  # the gradients of one batch are dropped
                optimizer.step()
                own.step()
            optimizer.zero_grad()
            own.zero_grad()
        equals(accelerator, net, expected)
        if (
            "stage3_param_persistence_threshold" in EVERYWHERE[number][1]
        ):  # with it, even small weights go when they were used
            with pytest.raises(RuntimeError, match="size"):
                several_losses(net, x, y, accelerator.backward, once=False)


def several_losses(net: Any, x: torch.Tensor, y: torch.Tensor, back: Callable[..., Any], *, once: bool) -> None:
    """Compute gradients of three losses, of which two come from one forward pass."""
    guess = net(x)
    first, second = (guess - y).square().mean(), guess.mean()
    if once:
        back(first + second)
    else:
        back(first, retain_graph=True)
        back(second)
    back(net(x).square().mean())


@world(2, quiet=30)
def test_a_step_reports_the_norm_before_clipping() -> None:
    """After a step, an engine's norm is the one that clipping returned, and that of the next step is its own."""
    for stage, accelerator in runs(EVERYWHERE[1:4]):
        net = model(dtype=torch.float)
        net, optimizer = accelerator.prepare(net, adam(net))
        x = samples(BATCH, torch.float)[:][0]
        for clips in (True, False):
            accelerator.backward(net(x).square().mean())
            norm = accelerator.clip_grad_norm_(net.parameters(), 1e-3 if clips else math.inf)
            assert norm > 1e-3
            optimizer.step()
            assert float(net.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-6), stage
            optimizer.zero_grad()
        accelerator.backward(net(x).square().mean())
        optimizer.step()
        assert 1e-3 < float(net.get_global_grad_norm()) != float(norm), stage
        accelerator.backward(net(x).square().mean())
        accelerator.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
        net.backward(net(x).square().mean())  # a step of the script's own, by DeepSpeed's calls
        net.step()
        assert float(net.get_global_grad_norm()) > 0, stage


@world(2, quiet=30)
def test_sixteen_bits_are_the_engines_own() -> None:
    """In bf16, every stage trains as 32 bits do, near enough, accumulated, cut short and clipped."""
    data = samples(6 * BATCH, torch.float)
    norms, weights = [], []
    for _, accelerator in runs(EVERYWHERE[1:], mixed_precision="bf16", gradient_accumulation_steps=2):
        net = model(dtype=torch.float)
        net, optimizer, loader = accelerator.prepare(net, adam(net), DataLoader(data, batch_size=BATCH))
        assert next(net.parameters()).dtype is torch.bfloat16
        for x, y, _ in loader:
            with accelerator.accumulate(net):
                accelerator.backward((net(x.bfloat16()) - y.bfloat16()).float().square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                step(optimizer)
        state = accelerator.get_state_dict(net)
        weights.append({name: value.float() for name, value in state.items()})
    expected, own = model(dtype=torch.float), []
    optimizer = adam(expected)
    for window in ((0, 4), (4, 6)):
        x, y, _ = data[window[0] * BATCH : window[1] * BATCH]
        (expected(x) - y).square().mean().backward()
        own.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.5)))
        step(optimizer)
    torch.testing.assert_close(norms, own * len(weights), rtol=0.02, atol=0.01)
    for state in weights:
        if state:
            torch.testing.assert_close(state, dict(expected.state_dict()), rtol=0.02, atol=0.02)


@world(2, quiet=30)
def test_the_configuration_decides_the_format() -> None:
    """Where it says bf16 and the script nothing, the run is in bf16 from its beginning; a script's "no" is refused."""
    begin()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(2, bf16={"enabled": True}))
    assert accelerator.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    net = model(dtype=torch.float)
    net, _ = accelerator.prepare(net, adam(net))
    assert next(net.parameters()).dtype is torch.bfloat16
    assert Accelerator().mixed_precision == "bf16"
    reset_all()
    with pytest.raises(ConfigurationError, match=r"mixed_precision='no' and bf16\.enabled=true"):
        Accelerator(cpu=True, mixed_precision="no", deepspeed_plugin=plugin(2, bf16={"enabled": True}))


@world(2, quiet=30)
def test_freed_engines_leave_the_process() -> None:
    """Of engines that were trained and freed one after the other none stays, in any stage; until then, they refuse."""
    for stage, accelerator in runs(EVERYWHERE[:4]):
        x, engines = samples(BATCH, torch.float)[:][0], []
        for _ in range(3):
            net = model(dtype=torch.float)
            net, optimizer = accelerator.prepare(net, adam(net))
            for _ in range(3):
                accelerator.backward(net(x).square().mean())
                step(optimizer)
            engines.append(weakref.ref(net))
            loss = net(x).square().mean()
            accelerator.free_memory()
            with pytest.raises(StateError, match="leads to none of the 0 engines"):
                accelerator.backward(loss)
            del net, optimizer, loss
        gc.collect()
        assert [made() for made in engines] == [None] * 3, stage


@world(2, quiet=30)
def test_the_configuration_makes_optimizer_and_schedule() -> None:
    """Stand-ins take rates from the script, a callable makes the schedule, and both move once for each window."""
    begin()
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    for scheduled in ("configuration", "callable"):
        others: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
        if scheduled == "configuration":
            names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
            warmup = dict.fromkeys(names, "auto")
            others["scheduler"] = {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}}
        given = plugin(3, **others)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=given, gradient_accumulation_steps=2)
        data, expected = samples(8 * BATCH, torch.float), model(dtype=torch.float)
        reference = adam(expected)
        net = model(dtype=torch.float)
        stand_in = DummyOptim(net.parameters(), lr=0.05, weight_decay=0.1)
        if scheduled == "callable":
            schedule = DummyScheduler(stand_in, lr_scheduler_callable=lambda own: decay(own))
        else:
            schedule = DummyScheduler(stand_in, total_num_steps=8, warmup_num_steps=1)
        net, optimizer, loader, schedule = accelerator.prepare(
            net, stand_in, DataLoader(data, batch_size=BATCH), schedule
        )
        rates = []
        for x, y, _ in loader:
            with accelerator.accumulate(net):
                accelerator.backward((net(x) - y).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(schedule.get_last_lr()[0])
        assert len(set(rates)) == len(rates) == 2
        for window in range(2):
            for group in reference.param_groups:
                group["lr"] = {"callable": 0.05 / (window + 1), "configuration": [0.0, rates[0]][window]}[scheduled]
            x, y, _ = data[window * 4 * BATCH : (window + 1) * 4 * BATCH]
            (expected(x) - y).square().mean().backward()
            step(reference)
        equals(accelerator, net, expected)
        reset_all()


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


@world(2, quiet=30)
def test_contradictions_are_refused_before_an_engine_is_made() -> None:
    """Windows, batch sizes, formats and stand-ins that differ are named on every rank; nothing was prepared."""
    begin()

    def prepares(given: DeepSpeedPlugin, loader: Any = None, optimizer: Any = adam, **arguments: Any) -> None:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=given, **arguments)
        net = model(dtype=torch.float)
        try:
            made = [] if optimizer is None else [optimizer(net)]
            accelerator.prepare(net, *made, *([] if loader is None else [loader]))
        finally:
            assert (accelerator._models, accelerator._optimizers, accelerator._dataloaders) == ([], [], [])
            reset_all()

    own = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    wrong = DataLoader(samples(8, torch.float), batch_size=3)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps=2 in the script and"):
        prepares(plugin(2, gradient_accumulation_steps=3), gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="train_micro_batch_size_per_gpu=2 and loaders of 3"):
        prepares(plugin(2), wrong)
    with pytest.raises(ConfigurationError, match="is taken from the loaders; got 0 loaders"):
        prepares(plugin(2, train_micro_batch_size_per_gpu="auto"))
    with pytest.raises(ConfigurationError, match=r"mixed_precision='bf16' and bf16\.enabled=false"):
        prepares(plugin(2, bf16={"enabled": False}), mixed_precision="bf16")
    with pytest.raises(PreparationError, match="got AdamW in the script and AdamW in the DeepSpeed"):
        prepares(plugin(2, **own))
    with pytest.raises(PreparationError, match="DummyOptim takes the place of the optimizer"):
        prepares(plugin(2), optimizer=lambda net: DummyOptim(net.parameters()))
    with pytest.raises(PreparationError, match="got SGD"):
        prepares(
            plugin(2, {"offload_optimizer": {"device": "cpu"}}),
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        )
    with pytest.raises(ConfigurationError, match=r"got Sequential without config\.hidden_size"):
        prepares(plugin(3, {"reduce_bucket_size": "auto"}), optimizer=None)
    with pytest.raises(EngineUnavailableError, match="fp8"):
        prepares(plugin(2), mixed_precision="fp8")
    # The engine makes its own steps, which a meter would never see.
    with pytest.raises(EngineUnavailableError, match="MeterKwargs under deepspeed"):
        prepares(plugin(2), kwargs_handlers=[MeterKwargs()])
    with pytest.raises(ValueError, match="fp16 is not supported"):  # DeepSpeed's own
        prepares(plugin(2, fp16={"enabled": True}))


@world(2, quiet=30)
def test_sixteen_bits_are_saved_whole_by_both_ways(tmp_path: Path) -> None:
    """Where weights are gathered, save_model and DeepSpeed's save_16bit_model write the same; else, neither writes."""
    gathering = [
        (stage, {"stage3_gather_16bit_weights_on_model_save": gathers})
        for stage, gathers in ((2, False), (3, True), (3, False))
    ]
    for number, (_, accelerator) in enumerate(runs(gathering, mixed_precision="bf16")):
        net = model(dtype=torch.float)
        expected = {name: value.bfloat16() for name, value in net.state_dict().items()}
        net, _ = accelerator.prepare(net, adam(net))
        folder = tmp_path / str(number)
        written = net.save_16bit_model(str(folder / "own"), "weights.bin")
        assert written is (number < 2)
        if written:
            accelerator.save_model(net, folder / "model")
            if accelerator.is_main_process:
                own = torch.load(folder / "own" / "weights.bin", weights_only=True)
                torch.testing.assert_close(dict(own), expected, rtol=0, atol=0)
                whole = load_file(folder / "model" / "model.safetensors")
                torch.testing.assert_close(whole, expected, rtol=0, atol=0)
        else:
            assert not (folder / "own" / "weights.bin").exists()
            with pytest.raises(EngineUnavailableError, match=r"got accelerator\.ema"):
                accelerator.ema(net)
            for gather, more in ((accelerator.get_state_dict, ()), (accelerator.save_model, (folder / "model",))):
                with pytest.raises(ConfigurationError, match="stage3_gather_16bit_weights_on_model_save=false"):
                    gather(net, *more)
            assert not list(folder.glob("model/*"))
        accelerator.wait_for_everyone()


def language_model(given: DeepSpeedPlugin, kind: str, seed: int, **sizes: int) -> tuple[Accelerator, Any, Any, Any]:
    """Return a run of a small model of a kind, the model that it prepared, its optimizer, and a plain copy."""
    begin()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=given)
    transformers: Any = importlib.import_module("transformers")
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, num_hidden_layers=2, **sizes)
    torch.manual_seed(seed)
    net = getattr(transformers, f"{kind}ForCausalLM")(config)
    expected = copy.deepcopy(net)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    return accelerator, net, optimizer, expected


def trains_as(
    expected: Any, accelerator: Accelerator, net: Any, optimizer: Any, rows: torch.Tensor, own: slice, clip: float
) -> None:
    """Train a prepared model on its rows, and a plain one on all of them: norms and weights are equal."""
    plain_optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(3):
        loss = net(input_ids=rows[own], labels=rows[own]).loss
        wanted = expected(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        wanted.backward()
        if own == slice(None):
            torch.testing.assert_close(loss, wanted)
        norm = accelerator.clip_grad_norm_(net.parameters(), clip)
        torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(expected.parameters(), clip))
        step(optimizer, plain_optimizer)
    equals(accelerator, net, expected)


def split(stage: int, seed: int = 0) -> tuple[Accelerator, Any, Any, Any]:
    """Return a run of a small Llama whose layers DeepSpeed splits over both ranks, its parts, and a plain copy."""
    found = language_model(plugin(stage, tensor_parallel={"autotp_size": 2}), "Llama", seed)
    assert found[0]._runtime.layout.replicas == 1
    return found


@requires("transformers")
@world(2, quiet=30)
def test_layers_that_deepspeed_splits_train_as_on_one_process(tmp_path: Path) -> None:
    """Losses, norms and weights are whole ones, also saved and restored; stage 0 has no common norm and says so."""
    accelerator, net, optimizer, expected = split(1)
    rows = torch.arange(24).reshape(3, 8) % 32
    trains_as(expected, accelerator, net, optimizer, rows, slice(None), 0.1)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(net, tmp_path / "model")
    reset_all()
    accelerator, net, *_ = split(1, 1)
    accelerator.load_state(tmp_path / "state")
    equals(accelerator, net, expected)
    reset_all()
    bare = split(0, 2)[3]
    load_model(bare, tmp_path / "model")
    torch.testing.assert_close(dict(bare.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)
    reset_all()
    accelerator, net, *_ = split(0)
    accelerator.backward(net(input_ids=rows, labels=rows).loss)
    with pytest.raises(PreparationError, match="got stage 0 with tensor_parallel"):
        accelerator.clip_grad_norm_(net.parameters(), 0.1)


@requires("transformers")
@world(2, quiet=30)
def test_experts_are_gathered_as_one(tmp_path: Path) -> None:
    """In stage 3, blocks of experts that the plugin names are leaves, and train as on one process.

    Each rank's tokens go to other experts, which would gather other weights where experts are modules of their own.
    """
    given = plugin(3, {"stage3_param_persistence_threshold": 0})
    given.transformer_moe_cls_names = "MixtralSparseMoeBlock"
    accelerator, net, optimizer, expected = language_model(given, "Mixtral", 0, num_local_experts=4)
    from deepspeed.utils import z3_leaf_module

    leaves = [name for name, module in net.named_modules() if z3_leaf_module(module)]
    assert [type(net.get_submodule(name)).__name__ for name in leaves] == ["MixtralSparseMoeBlock"] * 2
    rows, first = torch.arange(32).reshape(4, 8) * 3 % 32, accelerator.process_index * 2
    trains_as(expected, accelerator, net, optimizer, rows, slice(first, first + 2), 0.5)


def prepared(stage: int, seed: int) -> tuple[Accelerator, Any, Any, Any]:
    """Return a run, and model, optimizer and loader that it prepared."""
    accelerator, net = run_of(stage), model(seed, torch.float)
    loader = DataLoader(samples(8 * BATCH, torch.float), batch_size=BATCH)
    return accelerator, *accelerator.prepare(net, adam(net), loader)


def losses_of(accelerator: Accelerator, net: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train an epoch on what a run prepared; return the losses of this rank."""
    found = []
    for x, y, _ in loader:
        loss = (net(x) - y).square().mean()
        accelerator.backward(loss)
        step(optimizer)
        found.append(loss.item())
    return found


@world(2, quiet=30)
def test_checkpoints_of_deepspeed_load_whole_or_not_at_all(tmp_path: Path) -> None:
    """DeepSpeed's own program reads them bit by bit; damage and another stage are refused."""
    for stage in (2, 3):
        accelerator, net, *others = prepared(stage, 3)
        losses_of(accelerator, net, *others)
        accelerator.save_state(tmp_path / str(stage))
        whole = dict(accelerator.get_state_dict(net))
        if accelerator.is_main_process:
            listed = Manifest.read(tmp_path / str(stage))
            present = [path for path in (tmp_path / str(stage)).rglob("*") if path.is_file()]
            names = {path.relative_to(tmp_path / str(stage)).as_posix() for path in present}
            names -= {MANIFEST_NAME, f"{LISTS_NAME}/1.json"}
            assert listed is not None
            assert names == {entry.name for entry in listed.entries}
            assert not listed.damages(tmp_path / str(stage))
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            assert (tmp_path / str(stage) / "latest").read_text() == "pytorch_model"
            found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / str(stage)))
            torch.testing.assert_close(dict(found), whole, rtol=0, atol=0)
        accelerator.wait_for_everyone()
        reset_all()
    accelerator, *_ = prepared(3, 11)
    with pytest.raises(CheckpointError, match="another stage of ZeRO"):
        accelerator.load_state(tmp_path / "2")
    if accelerator.is_main_process:
        file = tmp_path / "3" / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states"):
        accelerator.load_state(tmp_path / "3")


MOVED: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (0, "bf16", {}),
    (1, "no", {}),
    (2, "bf16", {}),
    (3, "no", {}),
    (3, "bf16", {"stage3_param_persistence_threshold": 0, "sub_group_size": 20}),
    (3, "no", HOST),
)
"""Stages, formats and settings in which checkpoints are loaded on other numbers of ranks."""


def moved(folder: Path, number: int, seed: int) -> tuple[Accelerator, Any, Any]:
    """Return a run, and a model with a frozen weight and an optimizer with two groups that it prepared."""
    stage, precision, of_zero = MOVED[number]
    accelerator = run_of(stage, of_zero, mixed_precision=precision)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    net.register_buffer("seen", torch.zeros((), dtype=torch.long))
    net[1].bias.requires_grad_(False)
    groups = [{"params": list(net[0].parameters()), "lr": 0.02}, {"params": [net[1].weight, *net[2].parameters()]}]
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups, lr=0.05))
    return accelerator, net, optimizer


def whole_state(accelerator: Accelerator, net: Any) -> dict[str, Any]:
    """Return all that an engine holds of its parameters, whole and in 32 bits, and its buffers."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"buffer {name}": value.clone() for name, value in net.module.named_buffers()}
    if net.zero_optimization_stage() in (1, 2):  # else DeepSpeed finds no states of a second group
        net.optimizer._hp_optimizer_states_linked = False
        net.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in net.module.named_parameters():
        if not parameter.requires_grad:
            with zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        elif net.zero_optimization():
            found[name] = safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {kind}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    if not net.zero_optimization():  # in 16 bits, DeepSpeed has the exact weights beside the model's
        for exact, rounded in zip(net.optimizer.fp32_groups, net.optimizer.fp16_groups, strict=True):
            names = {parameter: name for name, parameter in net.module.named_parameters()}
            found |= {names[own]: value.detach().clone() for own, value in zip(rounded, exact, strict=True)}
    return found


def steps_once(accelerator: Accelerator, net: Any, optimizer: Any) -> None:
    """Train on a batch that is the same for all ranks."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3).to(next(net.parameters()).dtype)
    accelerator.backward(net(x).float().square().mean())
    step(optimizer)
    net.module.seen += 1


@world(2, quiet=30)
def saves_for_others(folder: Path) -> None:
    """Train and save on two ranks; note what the engines hold, then and a step later."""
    for number in range(len(MOVED)):
        accelerator, net, optimizer = moved(folder, number, 3)
        for _ in range(2):
            steps_once(accelerator, net, optimizer)
        accelerator.save_state(folder / str(number))
        states = [whole_state(accelerator, net)]
        steps_once(accelerator, net, optimizer)
        states.append(whole_state(accelerator, net))
        if accelerator.is_main_process:
            torch.save(states, folder / f"{number}.pt")
        accelerator.wait_for_everyone()
        reset_all()


def loads_of_others(folder: Path) -> None:
    """Load what two ranks saved, and train on."""
    for number, (stage, precision, _) in enumerate(MOVED):
        accelerator, net, optimizer = moved(folder, number, 11)
        accelerator.load_state(folder / str(number))
        saved, later = torch.load(folder / f"{number}.pt", weights_only=True)
        torch.testing.assert_close(whole_state(accelerator, net), saved, rtol=0, atol=0)
        steps_once(accelerator, net, optimizer)
        near = {"no": 1e-5, "bf16": 0.02}[precision]
        torch.testing.assert_close(whole_state(accelerator, net), later, rtol=near, atol=near)
        if stage == 3:
            before = whole_state(accelerator, net)
            accelerator.save_state(folder / "again")
            accelerator.load_state(folder / "again")
            torch.testing.assert_close(whole_state(accelerator, net), before, rtol=0, atol=0)
        reset_all()


def test_other_numbers_of_ranks_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """One rank and three hold what two saved bit by bit, optimizer and frozen weights too, and train on alike."""
    saves_for_others(tmp_path)
    for ranks in (1, 3):
        world(ranks, quiet=30)(loads_of_others)(tmp_path)
    merge = pytest.importorskip("accel_parallel.checkpoint.merge", reason="needs accel-parallel to merge")
    for number in range(len(MOVED)):
        merge.merge_weights(tmp_path / str(number), tmp_path / "whole")
        found = load_file(tmp_path / "whole" / "model.safetensors")
        saved, _ = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        names = {name.removeprefix("buffer "): name for name in saved if " exp_avg" not in name}
        assert found.keys() == names.keys()
        for name, value in found.items():
            exact = saved[names[name]]
            wanted = exact.to(value.dtype) if number == 0 else exact  # stage 0 has 32-bit weights without names
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)


def dies_in_a_save(folder: Path, stage: int) -> None:
    """Save, behind training or not, note the next losses, and save again: one rank is killed before it writes."""
    accelerator, *own = prepared(stage, 3)
    losses_of(accelerator, *own)
    accelerator.save_state(folder / "state", blocking=stage == 2)
    (folder / f"losses-{accelerator.process_index}.json").write_text(json.dumps(losses_of(accelerator, *own)))
    write = FilePart.write

    def dies(part: FilePart, *args: Any) -> Any:
        if accelerator.process_index == 1 and "optim_states" in part.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(part, *args)

    FilePart.write = dies  # type: ignore[method-assign]
    accelerator.save_state(folder / "state")


def goes_on(folder: Path, stage: int) -> None:
    """Load what was saved whole into another model, and train on."""
    accelerator, *own = prepared(stage, 11)
    accelerator.load_state(folder / "state")
    expected = json.loads((folder / f"losses-{accelerator.process_index}.json").read_text())
    assert losses_of(accelerator, *own) == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_training_continues_exactly_after_a_kill_in_a_save(tmp_path: Path, stage: int) -> None:
    """The save before the killed one stands, and new processes compute the same losses from it."""
    with pytest.raises(pytest.fail.Exception, match="exit code"):
        run(dies_in_a_save, 2, (tmp_path, stage), quiet=20)
    world(2, quiet=20)(goes_on)(tmp_path, stage)


class Adapted(nn.Module):
    """A layer that bitsandbytes packed, which does not train, and an adapter, which does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        library: Any = importlib.import_module("bitsandbytes")
        self.base = library.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32).to("cpu")
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        found: torch.Tensor = self.base(x) + self.b(self.a(x))
        return found


@requires("bitsandbytes")
@world(2, quiet=30)
def test_packed_weights_train_whole_and_are_refused_in_parts() -> None:
    """They compute as on one process, after an evaluation too; stage 3 on a CPU, where they would not, is refused."""
    warnings.filterwarnings("ignore", "bitsandbytes::", UserWarning)  # torch warns of a kernel without a derivative
    batch = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(1))

    def losses(net: Any, optimizer: Any, backward: Any) -> list[float]:
        found = []
        for trains in (True, False, True, True):
            net.train(trains)
            with torch.set_grad_enabled(trains):
                loss = (net(batch) - 1).square().mean()
            found.append(loss.item())
            if trains:
                backward(loss)
                step(optimizer)
        return found

    def adapters(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)

    alone, parts = Adapted(), Adapted()
    expected = losses(alone, adapters(alone), torch.Tensor.backward)
    for stage, accelerator in runs((stage, {}) for stage in (0, 1, 2)):
        ours = Adapted()
        prepared = accelerator.prepare(ours, adapters(ours))
        assert losses(*prepared, accelerator.backward) == pytest.approx(expected, abs=1e-6), stage
    accelerator = run_of(3, {"stage3_param_persistence_threshold": 0})
    before = dict(parts.named_parameters())
    with pytest.raises(PreparationError, match="got Adapted in 4 bits on cpu"):
        accelerator.prepare(parts, adapters(parts))
    assert all(before[name] is parameter for name, parameter in parts.named_parameters())
