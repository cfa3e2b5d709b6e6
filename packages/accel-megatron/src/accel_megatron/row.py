"""Megatron-LM as every part of accel knows it; imports nothing of it."""

from collections.abc import Mapping
from typing import Any

from accel_core.options.engines import Engine

ENGINE = Engine(
    "megatron",
    "Megatron-LM",
    "megatron-core",
    "0.16.0",
    "transformers",
    strategy="accel_megatron.strategy:MegatronStrategy",
    plugin="accel_megatron.plugin:MegatronLMPlugin",
    argument="megatron_lm_plugin",
    flag="ACCELERATE_USE_MEGATRON_LM",
    label="MEGATRON_LM",
    switch="use_megatron_lm",
    options="accel_megatron.options:MegatronOptions",
    mesh="accel_megatron.row:mesh",
    batch="accel_megatron.row:batch",
)


def mesh(settings: Mapping[str, Any], processes: int) -> dict[str, int]:
    """Return the axes that the degrees give the processes, the outermost first."""
    shared = {
        "cp": int(settings["megatron_lm_context_parallel_size"] or 1),
        "tp": int(settings["megatron_lm_tp_degree"]),
    }
    pipeline = int(settings["megatron_lm_pp_degree"])
    replica = pipeline * shared["cp"] * shared["tp"]
    return {"pp": pipeline, "dp": max(1, processes // replica), **shared}


def batch(settings: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Return the samples of a step and of a process, which the script decides, and the batches of a step."""
    return None, None, int(settings["megatron_lm_num_micro_batches"] or 1)
