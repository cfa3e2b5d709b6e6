"""Builds a DeepSpeed configuration from fields, and fills in "auto" values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_core.errors import ConfigurationError

if TYPE_CHECKING:
    from accel_deepspeed.plugin_config import HfDeepSpeedConfig

__all__ = ["fill", "fill_all", "from_fields", "refuse_mismatches", "set_number_format"]


def from_fields(
    *,
    stage: int | str | None,
    accumulation: int | str | None,
    clipping: float | str | None,
    optimizer: tuple[str | None, str | None],
    parameters: tuple[str | None, str | None],
    gather_16bit: bool | str | None,
) -> dict[str, Any]:
    """Return the configuration that the fields of a plugin describe."""

    def place(device: str | None, path: str | None) -> dict[str, Any]:
        return {"device": device, "nvme_path": path if device == "nvme" else None}

    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": accumulation,
        # Always present: without the key, DeepSpeed clips to a norm of 1.
        "gradient_clipping": clipping or 0.0,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": place(*optimizer),
            "offload_param": place(*parameters),
            "stage3_gather_16bit_weights_on_model_save": gather_16bit,
        },
    }


def fill(config: HfDeepSpeedConfig, key: str, values: Mapping[str, Any]) -> list[str]:
    """Fill a key whose value is "auto", or compare one that is set."""
    node, last = config.find_config_node(key)
    if node is None:
        return []
    if node.get(last) == "auto":
        if key not in values:
            raise ConfigurationError(
                f"The DeepSpeed configuration has 'auto' for {key!r}, and no value is known; got {sorted(values)}. "
                "Write a value into the configuration, or pass one."
            )
        node[last] = values[key]
    elif key in values and node.get(last) not in (None, values[key]):
        return [f"- ds {key}={node[last]} vs arg {key}={values[key]}"]
    return []


def fill_all(config: HfDeepSpeedConfig, part: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> list[str]:
    """Fill every "auto" value in a part of a configuration, or refuse it, and compare the others."""
    noted: list[str] = []
    for key, value in part.items():
        if isinstance(value, dict):
            noted += fill_all(config, value, values, f"{prefix}{key}.")
        else:
            noted += fill(config, f"{prefix}{key}", values)
    return noted


def refuse_mismatches(lines: list[str]) -> None:
    """Refuse a configuration that differs from the run."""
    listed = "\n".join(lines)
    raise ConfigurationError(
        f"The DeepSpeed configuration and the run contradict each other; got\n{listed}\nSet these keys of the "
        "configuration to 'auto'."
    )


def set_number_format(config: HfDeepSpeedConfig, name: str) -> None:
    """Write the run's number format into a configuration, and compare it with what is there."""
    parts = config.config
    other = {"fp16": "bf16", "bf16": "fp16"}.get(name)
    if other is not None:
        if name not in parts:
            parts[name] = {"enabled": True, "auto_cast": True} if name == "fp16" else {"enabled": True}
        if config.is_true(f"{other}.enabled") and config.get_value(f"{other}.enabled") != "auto":
            raise ConfigurationError(
                f"The run uses {name} and the DeepSpeed configuration {other}; got {parts[other]}. Make them agree."
            )
    for each in ("fp16", "bf16"):
        part = parts.setdefault(each, {"enabled": False})
        if part.get("enabled") == "auto":
            part["enabled"] = each == name
