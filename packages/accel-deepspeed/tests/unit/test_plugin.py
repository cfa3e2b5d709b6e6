"""The DeepSpeed plugin and DeepSpeed's configuration: filling, comparing, refusing."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from accel_core.errors import ConfigurationError, StateError
from accel_deepspeed import plugin as deepspeed
from accel_deepspeed.plugin import DeepSpeedPlugin
from accel_deepspeed.plugin_config import HfDeepSpeedConfig


def _zero(stage: int | str, **others: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **others}


@pytest.mark.parametrize(
    ("config", "zero2", "zero3", "offload"),
    [
        (_zero(2), True, False, False),
        (_zero(3), False, True, False),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, False, True, True),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, True, False, True),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, True, False, False),
        ({}, False, False, False),
    ],
)
def test_stage_and_offloading_are_told(config: dict[str, Any], zero2: bool, zero3: bool, offload: bool) -> None:
    """The configuration says what is sharded and whether it leaves the device, and is a copy."""
    found = HfDeepSpeedConfig(config)
    assert (found.is_zero2(), found.is_zero3(), found.is_offload()) == (zero2, zero3, offload)
    assert found.config == config
    assert found.config is not config


def test_configuration_comes_from_file_text_or_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, also in the launcher's variable, JSON text and that in base64 are read; anything else is refused."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_zero(1)))
    encoded = base64.urlsafe_b64encode(json.dumps(_zero(1)).encode()).decode()
    for source in (str(path), path, json.dumps(_zero(1)), encoded):
        assert HfDeepSpeedConfig(source).config == _zero(1)
    for source in (str(tmp_path / "absent.json"), 3, None):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            HfDeepSpeedConfig(source)  # type: ignore[arg-type]
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert DeepSpeedPlugin().zero_stage == 1


def test_dotted_keys_reach_any_depth() -> None:
    """Keys with dots are found, told apart by truth, and deleted."""
    found = HfDeepSpeedConfig({"a": {"b": {"c": 1}}, "yes": True, "no": False, "null": None})
    assert found.get_value("a.b.c") == 1
    assert found.find_config_node("a.b.c") == ({"c": 1}, "c")
    assert found.find_config_node("a.x.c") == (None, "c")
    assert found.get_value("x.y", "other") == "other"
    assert [found.is_true(key) for key in ("yes", "no", "null", "absent")] == [True, False, False, False]
    assert [found.is_false(key) for key in ("yes", "no", "null", "absent")] == [False, True, False, False]
    found.del_config_sub_tree("a.b")
    found.del_config_sub_tree("x.y")
    assert found.config["a"] == {}
    with pytest.raises(ConfigurationError, match=r"'x.y'"):
        found.del_config_sub_tree("x.y", must_exist=True)


def test_fields_make_a_configuration() -> None:
    """Without a configuration one is made from the fields, with what is open left for later."""
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (2, "auto", "auto")
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": float("inf"),
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }
    assert plugin.hf_ds_config.config is plugin.deepspeed_config


@pytest.mark.parametrize(
    ("field", "variable", "text", "value"),
    [
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3", 3),
        ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "0.25", 0.25),
        ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", 3),
        ("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "cpu"),
        ("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme", "nvme"),
        ("offload_optimizer_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/a", "/a"),
        ("offload_param_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/b", "/b"),
        ("zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true", True),
        ("transformer_moe_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A, B", "A,B"),
        ("enable_msamp", "ACCELERATE_FP8_BACKEND", "msamp", True),
    ],
)
def test_environment_fills_the_fields(
    monkeypatch: pytest.MonkeyPatch, field: str, variable: str, text: str, value: object
) -> None:
    """Each variable fills its field."""
    monkeypatch.setenv(variable, text)
    assert getattr(DeepSpeedPlugin(), field) == value


@pytest.mark.parametrize(("given", "written"), [(0, 0.0), (0.0, 0.0), (0.5, 0.5), ("auto", "auto"), (None, "auto")])
def test_no_clipping_is_written_out(given: float | str | None, written: float | str) -> None:
    """DeepSpeed clips to a norm of 1 where the key is missing, so not to clip has to be said."""
    assert DeepSpeedPlugin(gradient_clipping=given).deepspeed_config["gradient_clipping"] == written


def test_a_configuration_counts_and_its_gaps_are_filled() -> None:
    """What a configuration says goes into the fields; where it says "auto" the fields go into it."""
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}},
            "gradient_clipping": 2.0,
        },
        zero_stage=3,
    )
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", 2.0)
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 3
    assert plugin.gradient_accumulation_steps == "auto"  # a key that is not there decides nothing
    assert plugin.zero3_init_flag is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"zero_stage": 4}, r"zero_stage is not one of its choices; got 4"),
        ({"offload_param_device": "moon"}, r"'moon'.*nvme"),
        ({"hf_ds_config": {"train_batch_size": 1}}, r"zero_optimization"),
        ({"hf_ds_config": _zero(3), "enable_msamp": True}, r"MS-AMP"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], words: str) -> None:
    """Stages, devices and combinations that do not exist are refused."""
    with pytest.raises(ConfigurationError, match=words):
        DeepSpeedPlugin(**arguments)


def test_options_beside_a_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a DeepSpeed file would override in silence are named."""
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage")
    with pytest.raises(ConfigurationError, match=r"\['zero_stage'\]"):
        DeepSpeedPlugin(hf_ds_config=_zero(2))
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file")
    assert DeepSpeedPlugin(hf_ds_config=_zero(2)).zero_stage == 2


def test_sharded_building_is_for_stage_three() -> None:
    """Asking for it in another stage warns and switches it off; a block of code can be without it."""
    with pytest.warns(UserWarning, match="zero3_init_flag"):
        plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)
    assert not plugin.is_zero3_init_enabled()
    assert DeepSpeedPlugin(zero_stage=3).is_zero3_init_enabled()
    assert not DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False).is_zero3_init_enabled()
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()


def test_what_waits_is_filled_and_what_is_set_compared() -> None:
    """Processing fills every "auto", adds no key, and names values that differ and keys that nobody fills."""
    plugin = DeepSpeedPlugin(hf_ds_config=_zero(2, train_batch_size="auto", optimizer={"params": {"lr": "auto"}}))
    plugin.deepspeed_config_process(**{"train_batch_size": 4, "optimizer.params.lr": 0.1})
    assert plugin.get_value("train_batch_size") == 4
    assert plugin.get_value("optimizer.params.lr") == 0.1
    with pytest.raises(ConfigurationError, match=r"(?s)stage=2 vs.*stage=3.*train_batch_size=4 vs.*=8"):
        plugin.deepspeed_config_process(**{"train_batch_size": 8, "zero_optimization.stage": 3})
    plugin.deepspeed_config_process(must_match=False, train_batch_size=8)
    assert plugin.get_value("train_batch_size") == 4
    plugin.fill_match("a.b", **{"a.b": 1})
    assert "a" not in plugin.deepspeed_config
    plugin = DeepSpeedPlugin(hf_ds_config=_zero(2, a={"b": "auto"}))
    assert (plugin.is_auto("a.b"), plugin.is_auto("a.c")) == (True, False)
    with pytest.raises(ConfigurationError, match=r"'a.b'"):
        plugin.deepspeed_config_process(train_batch_size=1)


@pytest.mark.parametrize(
    ("word", "config", "fp16", "bf16"),
    [
        ("fp16", {}, {"enabled": True, "auto_cast": True}, {"enabled": False}),
        ("bf16", {}, {"enabled": False}, {"enabled": True}),
        ("no", {}, {"enabled": False}, {"enabled": False}),
        ("bf16", {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"enabled": False}, {"enabled": True}),
        (
            "fp16",
            {"fp16": {"enabled": "auto", "loss_scale": 0}},
            {"enabled": True, "loss_scale": 0},
            {"enabled": False},
        ),
        ("fp16", {"fp16": {"enabled": False}}, {"enabled": False}, {"enabled": False}),
    ],
)
def test_number_format(word: str, config: dict[str, Any], fp16: dict[str, Any], bf16: dict[str, Any]) -> None:
    """The run's number format fills the configuration, and is refused where that says another one."""
    plugin = DeepSpeedPlugin(hf_ds_config=_zero(2, **config))
    plugin.set_mixed_precision(word)
    assert (plugin.deepspeed_config["fp16"], plugin.deepspeed_config["bf16"]) == (fp16, bf16)
    with pytest.raises(ConfigurationError, match=r"fp16.*bf16"):
        DeepSpeedPlugin(hf_ds_config=_zero(2, bf16={"enabled": True})).set_mixed_precision("fp16")


def test_only_the_state_selects() -> None:
    """A plugin is selected through the state."""
    plugin = DeepSpeedPlugin()
    with pytest.raises(StateError, match="select_deepspeed_plugin"):
        plugin.select()
    assert not plugin.selected


def test_stand_ins_carry_what_they_are_given() -> None:
    """The optimizer and the schedule of a configuration are stood for by plain objects."""
    optimizer = deepspeed.DummyOptim([1], lr=2, weight_decay=3, extra=4)
    assert (optimizer.params, optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == ([1], 2, 3, {"extra": 4})
    schedule = deepspeed.DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=1, extra=4)
    assert (schedule.total_num_steps, schedule.warmup_num_steps, schedule.kwargs) == (9, 1, {"extra": 4})
