"""Filling DeepSpeed's configuration from a run, and refusing what contradicts it; the library is not needed."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from accel_core.errors import ConfigurationError, MissingDependencyError, PreparationError
from accel_core.host import installed
from accel_core.mesh.layout import Layout
from accel_core.optim.accumulation import Accumulation
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.process.world import ensure
from accel_core.state.gradient import GradientState
from accel_core.state.run import resolve_precision
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_deepspeed import configuration
from accel_deepspeed.configuration import Filling, Members
from accel_deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_deepspeed.row import ENGINE
from accel_deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.usefixtures("fresh_state")


def parts(steps: int = 1, precision: str = "no", replicas: int = 2) -> Parts:
    """Return what a strategy is built from on one of several ranks."""
    return Parts(
        world=ensure(cpu=True),
        layout=Layout.of(0, replicas),
        mesh=None,
        precision=PrecisionRequest(precision, AutocastKwargs(), GradScalerKwargs()),
        device_placement=True,
        compilation=TorchDynamoPlugin(),
        accumulation=Accumulation(GradientState(GradientAccumulationPlugin(num_steps=steps))),
        data=DataLoaderConfiguration(),
    )


def zero(stage: int = 2, of_zero: dict[str, Any] | None = None, **others: Any) -> DeepSpeedPlugin:
    """Return a plugin with a configuration of its own."""
    open_ones = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    waiting = dict.fromkeys(open_ones, "auto")
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage, **(of_zero or {})}, **waiting, **others})


def fill(plugin: DeepSpeedPlugin, run: Parts | None = None, sizes: Any = (4,), **given: Any) -> dict[str, Any]:
    """Fill a configuration for a small model."""
    net = given.pop("model", None) or torch.nn.Linear(2, 2)
    optimizer = given.get("optimizer") or torch.optim.SGD(net.parameters())
    return Filling(run or parts()).fill(
        plugin.hf_ds_config, Members(net, optimizer, given.get("schedule"), sizes, plugin.is_train_batch_min)
    )


@pytest.mark.parametrize("said", [{}, {"gradient_clipping": "auto"}])
def test_what_is_open_comes_from_loaders_and_run(said: dict[str, str]) -> None:
    """Batch sizes multiply, the window is the run's, and nothing is clipped that the script does not clip."""
    plugin = zero(**said)
    config = fill(plugin, parts(steps=3))
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 3)
    assert config["train_batch_size"] == 4 * 3 * 2
    assert config["gradient_clipping"] == 0.0
    assert plugin.deepspeed_config == config
    assert plugin.deepspeed_config is not config
    # The total that transformers writes counts all processes; where ranks share sequences, fewer of them read data.
    run = dataclasses.replace(parts(steps=3), layout=Layout.of(0, 4, {"dp_shard": 2, "sp": 2}))
    assert fill(zero(train_batch_size=4 * 3 * 4), run)["train_batch_size"] == 4 * 3 * 2
    for steps in (1, 3):  # a key that is not there contradicts nothing
        config = fill(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}), parts(steps=steps))
        assert (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]) == (steps, 4)


def test_a_second_model_fills_what_the_first_one_filled() -> None:
    """What one model filled is open for the next; what was written there since stays."""
    plugin = zero()
    filling, net = Filling(parts()), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    filling.fill(plugin.hf_ds_config, Members(net, optimizer, None, [4]))
    assert filling.fill(plugin.hf_ds_config, Members(net, optimizer, None, [6]))["train_micro_batch_size_per_gpu"] == 6
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 5
    with pytest.raises(ConfigurationError, match="got train_micro_batch_size_per_gpu=5 and loaders of 6"):
        filling.fill(plugin.hf_ds_config, Members(net, optimizer, None, [6]))


@pytest.mark.parametrize(("smallest", "expected"), [(True, 4), (False, 8)])
def test_several_loaders_give_their_smallest_or_largest_batch(smallest: bool, expected: int) -> None:
    """The plugin says which loader's batch counts; nobody guesses the size where one has none."""
    plugin = zero()
    plugin.is_train_batch_min = smallest
    assert fill(plugin, sizes=(4, 8))["train_micro_batch_size_per_gpu"] == expected
    for sizes in ((), (None,), (4, None)):
        with pytest.raises(ConfigurationError, match=r"'auto' and is taken from the loaders"):
            fill(zero(), sizes=sizes)


def test_stand_ins_fill_optimizer_and_schedule() -> None:
    """Rates come from the stand-ins; a schedule moves once for all processes, so it is that much shorter."""
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    plugin = zero(
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": "auto"}},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
    )
    optimizer = DummyOptim(torch.nn.Linear(2, 2).parameters(), lr=0.3, weight_decay=0.1, eps=1e-6)
    schedule = DummyScheduler(optimizer, total_num_steps=21, warmup_num_steps=3)
    config = fill(plugin, optimizer=optimizer, schedule=schedule)
    assert config["optimizer"]["params"] == {"lr": 0.3, "weight_decay": 0.1, "eps": 1e-6}
    assert config["scheduler"]["params"] == dict(zip(names, (0, 0.3, 3, 11), strict=True))
    # DeepSpeed 0.19.6 and later refuse a warm-up of 0 steps; older versions take 0 and 1 alike.
    plugin = zero(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}})
    config = fill(plugin, optimizer=optimizer, schedule=DummyScheduler(optimizer))
    assert config["scheduler"]["params"]["warmup_num_steps"] == 1


def test_a_version_that_steps_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is imported of it; the first one that is right serves."""
    monkeypatch.setattr(installed, "version_of", lambda _: "0.19.6")
    with pytest.raises(MissingDependencyError, match=r"needs deepspeed 0\.19\.8 or newer; got 0\.19\.6\. Run `pip"):
        ENGINE.require()
    monkeypatch.setattr(installed, "version_of", lambda _: "0.19.8")
    ENGINE.require()


def test_buffers_follow_the_width_of_the_model() -> None:
    """Sizes of stage 3 come from the model's configuration, and are refused without one."""
    waiting = {"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    net: Any = torch.nn.Linear(2, 2)
    net.config = type("Config", (), {"hidden_size": 10})()
    found = fill(zero(3, waiting), model=net)["zero_optimization"]
    assert (found["reduce_bucket_size"], found["stage3_param_persistence_threshold"]) == (100, 100)
    with pytest.raises(ConfigurationError, match=r"got Linear without config\.hidden_size"):
        fill(zero(3, waiting))


def test_the_configuration_counts_where_the_script_says_nothing() -> None:
    """One number of batches makes a step; two different ones are refused."""
    plugin = zero()
    plugin.deepspeed_config["gradient_accumulation_steps"] = 4
    assert configuration.steps_of(plugin.hf_ds_config, 1) == 4
    with pytest.raises(ConfigurationError, match=r"got gradient_accumulation_steps=2 in the script and .*=4 in"):
        configuration.steps_of(plugin.hf_ds_config, 2)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"only one precision; got fp16\.enabled and bf16"),
        (
            {"stage": 0, "of_zero": {"offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer.*=0\. Use stage 1",
        ),
        ({"stage": 2, "of_zero": {"offload_param": {"device": "nvme"}}}, r"offload_param.*stage=2\. Use stage 3"),
    ],
)
def test_contradictions_are_refused(plugin: dict[str, Any], words: str) -> None:
    """A configuration that contradicts itself is refused, and stays as it was."""
    made = zero(**plugin)
    before = copy.deepcopy(made.deepspeed_config)
    with pytest.raises(ConfigurationError, match=words):
        configuration.refuse_contradictions(made.hf_ds_config)
    assert made.deepspeed_config == before


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        ({"bf16": {"enabled": True}}, None, None),
        ({"bf16": {"enabled": True}}, "bf16", None),
        (
            {"bf16": {"enabled": True}},
            "no",
            r"mixed_precision='no' and bf16\.enabled=true\. Set bf16\.enabled to 'auto'",
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}},
            "fp16",
            r"mixed_precision='fp16' and bf16\.enabled=true",
        ),
        ({"bf16": {"enabled": False}}, "bf16", r"mixed_precision='bf16' and bf16\.enabled=false"),
        ({"bf16": {"enabled": False}}, None, None),
        ({"bf16": {"enabled": "auto"}}, "bf16", None),
        ({}, "no", None),
    ],
)
def test_number_formats_agree(config: dict[str, Any], asked: str | None, message: str | None) -> None:
    """The configuration decides where the script asks for no format; two that differ are refused."""
    plugin = zero(**config)
    name = resolve_precision(asked, of_engine=DeepSpeedStrategy.decided_precision(plugin))
    with nullcontext() if message is None else pytest.raises(ConfigurationError, match=message):
        configuration.refuse_format(plugin.hf_ds_config, name)
    if message is None:
        assert name == (asked or ("bf16" if config.get("bf16", {}).get("enabled") is True else "no"))
        assert fill(plugin, parts(precision=name))["bf16"] == {"enabled": name == "bf16"}


def test_an_optimizer_is_given_once() -> None:
    """A real optimizer beside one of the configuration, and a stand-in without one, are refused."""
    net = torch.nn.Linear(2, 2)
    real, stand_in = torch.optim.SGD(net.parameters()), DummyOptim(net.parameters())
    with pytest.raises(PreparationError, match=r"got SGD in the script and AdamW in the DeepSpeed"):
        configuration.refuse_stand_ins(zero(optimizer={"type": "AdamW"}).deepspeed_config, real, None)
    with pytest.raises(PreparationError, match=r"DummyOptim takes the place of the optimizer"):
        configuration.refuse_stand_ins(zero().deepspeed_config, stand_in, None)
    with pytest.raises(PreparationError, match=r"DummyScheduler takes the place of the scheduler"):
        configuration.refuse_stand_ins(zero().deepspeed_config, real, DummyScheduler(real))
    made = DummyScheduler(real, lr_scheduler_callable=lambda found: torch.optim.lr_scheduler.StepLR(found, 1))
    configuration.refuse_stand_ins(zero().deepspeed_config, real, made)
