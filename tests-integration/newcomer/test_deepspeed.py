"""Configuration files of the kinds that users of DeepSpeed have, and the example of the quickstart, launched."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits, requires

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SCRIPT = HERE / "deepspeed_script.py"

HEAD = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""

FIELDS = """\
deepspeed_config:
  gradient_accumulation_steps: {steps}
  gradient_clipping: 1.0
  offload_optimizer_device: {place}
  offload_param_device: {place}
  zero3_init_flag: {init}
  zero3_save_16bit_model: {init}
  zero_stage: {stage}
mixed_precision: {precision}
"""

FILE = """\
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
"""

OFFLOADED = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500,
        "stage3_prefetch_bucket_size": 500,
        "stage3_param_persistence_threshold": 10,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def fields(stage: int, *, precision: str = "no", place: str = "none", steps: int = 1) -> str:
    """Return a configuration of fields."""
    return HEAD + FIELDS.format(
        stage=stage, precision=precision, place=place, steps=steps, init=str(stage == 3).lower()
    )


TEMPLATES = {
    "zero1": fields(1),
    "zero2, two batches a step": fields(2, steps=2),
    "zero3": fields(3),
    "zero3, offloaded": HEAD + FILE,
    "zero2, bf16": fields(2, precision="bf16"),
}


def started(words: list[str], folder: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with one thread for each process, and return what it did."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder)} | variables
    return limits.run([sys.executable, *words], cwd=folder, env=environment, quiet=24, check=check)


def launched(words: list[str], folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the launcher."""
    return started(["-m", "accel_launch", "launch", *words], folder, check)


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a program found: its line of JSON."""
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def equal(found: dict[str, Any], expected: dict[str, Any], **near: float) -> None:
    """Compare norms and weights."""
    for key in ("norms", "weights"):
        assert found[key] == pytest.approx(expected[key], **(near or {"rel": 1e-4, "abs": 1e-5})), key


@functools.cache
def plain(steps: int) -> dict[str, Any]:
    """Return what the script finds on one process without DeepSpeed."""
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(steps), "ACCELERATE_USE_CPU": "true"}
    return found_by(started([str(SCRIPT)], HERE, **variables))


@requires("deepspeed", "accelerate")
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    """A script without a word of DeepSpeed is launched with each kind of file; norms and weights are plain ones."""
    (tmp_path / "config.yaml").write_text(TEMPLATES[kind])
    (tmp_path / "ds.json").write_text(json.dumps(OFFLOADED))
    found = found_by(launched(["--config_file", "config.yaml", str(SCRIPT)], tmp_path))
    expected = plain(2 if "two batches" in kind else 1)
    offloaded, sixteen = "offloaded" in kind, "bf16" in kind
    assert (found["stage"], found["world"]) == (int(kind[4]), 2)
    assert found["optimizer"] == ("DeepSpeedCPUAdam" if offloaded else "AdamW")
    assert found["dtype"] == ("torch.bfloat16" if sixteen else "torch.float32")
    equal(found, expected, **({"rel": 0.05, "abs": 0.02} if sixteen else {}))


@requires("deepspeed", "accelerate", "transformers")
def test_sequences_are_shared_by_flags_alone(tmp_path: Path) -> None:
    """A script without a word of DeepSpeed shares its sequences over ranks, with weights that are made in parts."""
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    script = [str(HERE / "sequences_script.py"), str(tmp_path / "model")]
    expected = found_by(started(script, tmp_path, ACCELERATE_USE_CPU="true"))
    sharded = ["--use_deepspeed", "--zero_stage=3", "--zero3_init_flag=true", "--zero3_save_16bit_model=true"]
    axes = ["size=2", "backend=deepspeed"]
    shared = ["--use_parallelism_config", *(f"--parallelism_config_sp_{axis}" for axis in axes)]
    found = found_by(launched(["--cpu", "--num_processes", "2", *sharded, *shared, *script], tmp_path))
    assert (found["world"], found["stage"], found["made in parts"]) == (2, 3, True)
    assert (found["tokens"], expected["tokens"]) == (4, 8)
    equal(found, expected)


@requires("deepspeed")
def test_fp8_on_a_cpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The template with fp8 is refused with both places named."""
    (tmp_path / "config.yaml").write_text(fields(2, precision="fp8"))
    done = launched(["--config_file", "config.yaml", str(SCRIPT)], tmp_path, check=False)
    assert done.returncode != 0
    assert re.search(r"got fp8 from config\.yaml:\d+, and cpu from config\.yaml:\d+", done.stderr), done.stderr


@requires("deepspeed", "sklearn", "accel", "tensorboard")
def test_the_example_trains_in_stage_3(tmp_path: Path) -> None:
    """The example of the quickstart reaches the accuracy of a plain run, and writes whole weights."""
    scores = []
    for flags in ([], ["--use_deepspeed", "--zero_stage", "3", "--zero3_save_16bit_model", "true"]):
        folder = tmp_path / str(len(flags))
        script = [str(EXAMPLES / "train_digits.py"), "--folder", str(folder)]
        done = launched(["--cpu", "--num_processes", "2", *flags, *script], tmp_path)
        scores.append(float(re.search(r"test accuracy\W+([\d.]+)", done.stdout)[1]))  # type: ignore[index]
        assert list((folder / "model").glob("*.safetensors"))
    assert scores[1] == pytest.approx(scores[0], abs=0.005)
