"""Every environment variable that Accelerate is seen to use: what it does here, or why it does nothing."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.devices import registry
from accel_core.errors import ConfigurationError, DeviceUnavailableError, MissingDependencyError
from accel_core.host.environ import patch_environment
from accel_core.logging import get_logger
from accel_core.options.hardware import HARDWARE
from accel_core.options.option import Option, options_of
from accel_core.precision.fp8 import backend
from accel_core.process import world
from accel_core.state import PartialState
from accel_core.strategies.registry import Request, choose

pytestmark = pytest.mark.usefixtures("fresh_state")

NAMES: list[str] = json.loads((Path(__file__).parent / "environment_names.json").read_text())
TABLES = ("compilation", "fp8", "parallelism")


def _options() -> dict[str, Option]:
    found: dict[str, Option] = {}
    for table in TABLES:
        for name, value in vars(importlib.import_module(f"accel_core.options.{table}")).items():
            if name.endswith("Options") and isinstance(value, type):
                found |= {option.environment: option for option in options_of(value)}
    return found


OPTIONS = _options()


def _raises(error: type[Exception]) -> Callable[[], bool]:
    def probe() -> bool:
        with pytest.raises(error):
            Accelerator()
        return True

    return probe


def _asks_for(engine: str, package: str) -> Callable[[], bool]:
    """Probe an engine that may be of a package which is not installed."""

    def probe() -> bool:
        try:
            return choose(Request(1)).strategy.name == engine
        except MissingDependencyError as error:
            return f"{package} is not installed" in str(error)

    return probe


def _writes_errors_only() -> bool:
    before = logging.root.level
    try:
        return get_logger("accel.level").logger.level == logging.ERROR
    finally:
        logging.root.setLevel(before)


def _threads_stay() -> bool:
    """Say whether ranks that share a machine leave the number of threads alone where the user chose it."""
    before = torch.get_num_threads()
    world._share_cores(10**6)
    return torch.get_num_threads() == before


EFFECTS: dict[str, tuple[str, Callable[[], bool]]] = {
    "ACCELERATE_CPU_AFFINITY": ("1", lambda: PartialState().initialized),
    "ACCELERATE_DEBUG_MODE": ("1", lambda: PartialState().debug),
    "ACCELERATE_DYNAMO_BACKEND": ("eager", lambda: Accelerator().state.dynamo_plugin.backend == "EAGER"),
    "ACCELERATE_FP8_BACKEND": ("MSAMP", lambda: backend.choose_backend([]).value == "MSAMP"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("3", lambda: Accelerator().gradient_accumulation_steps == 3),
    "ACCELERATE_LOG_LEVEL": ("ERROR", _writes_errors_only),
    "ACCELERATE_MIXED_PRECISION": ("bf16", lambda: Accelerator().mixed_precision == "bf16"),
    "ACCELERATE_TORCH_DEVICE": ("meta", _raises(DeviceUnavailableError)),
    "ACCELERATE_USE_CPU": ("true", lambda: PartialState()._cpu is True),
    "ACCELERATE_USE_DEEPSPEED": ("true", _asks_for("deepspeed", "accel-deepspeed")),
    "ACCELERATE_USE_FSDP": ("true", _asks_for("fsdp1", "accel-parallel")),
    "ACCELERATE_USE_MEGATRON_LM": ("true", _asks_for("megatron", "accel-megatron")),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", lambda: Accelerator().parallelism_config is not None),
    "OMP_NUM_THREADS": ("1", _threads_stay),
    "USE_TORCH_XLA": ("0", lambda: not registry.named("xla").is_available()),
}

VISIBLE = {
    **{name: f"{name.upper()}_VISIBLE_DEVICES" for name in ("cuda", "mlu", "musa", "sdaa")},
    "hpu": "HABANA_VISIBLE_MODULES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}
"""Which variable hides devices of a kind."""

ELSEWHERE: dict[str, str] = {
    "ACCELERATE_BYPASS_DEVICE_MAP": "ranks/test_accelerator.py: it needs two processes",
    "ACCELERATE_DEBUG_RDV_FILE": "every test on several ranks meets through it",
    "ACCELERATE_DOWNCAST_BF16": "devices/xla.py: needs a TPU, never run on hardware",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "accel-bigmodel reads and tests it",
    "ACCELERATE_ENABLE_RICH": "accelerate: is_rich_available answers by it",
    "ACCELERATE_CONFIG_DS_FIELDS": "the launcher writes it; accel-deepspeed reads and tests it",
    "ACCELERATE_GRADIENT_CLIPPING": "accel-deepspeed reads and tests it",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "the launcher writes it into a SageMaker job",
    "ACCELERATE_USE_SAGEMAKER": "the launcher writes it into a SageMaker job",
    "ACCELERATE_ALLOW_CP_STANDALONE": "context parallelism is an engine that is asked for and refused by name",
    "DEEPSPEED_USE_HPU": "DeepSpeed's own, for its engine",
    "HF_HOME": "the launcher's default location of configuration files",
    "KMP_AFFINITY": "the launcher sets it for MPI runs on Intel processors",
    "KMP_BLOCKTIME": "the launcher sets it for MPI runs on Intel processors",
    "MASTER_ADDR": "process/test_rendezvous.py",
    "MASTER_PORT": "process/test_rendezvous.py",
    "NODE_RANK": "the launcher's machine rank under other launchers",
    "PJRT_DEVICE": "torch_xla's own",
    "PT_HPU_LAZY_MODE": "habana_frameworks' own",
    **dict.fromkeys(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
        "process/test_rendezvous.py",
    ),
    **{
        f"{family}_COMM_WORLD_{name}": "process/test_rendezvous.py"
        for family in ("OMPI", "MV2")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    },
    **dict.fromkeys(
        ("USE_CUSTOM_FSDP", "USE_DISTRIBUTED_OPTIMIZER", "USE_PRECISION_AWARE_OPTIMIZER"),
        "the end of a variable of accel-megatron, which reads and tests it",
    ),
    "USE_ROTARY_POSITION_EMBEDDINGS": "the end of a variable of accel-megatron, which reads and tests it",
    "USE_ORIG_PARAMS": "the end of a variable of accel-parallel, which reads and tests it",
    "XLA_DOWNCAST_BF16": "devices/xla.py writes it, never run on hardware",
    "XLA_USE_BF16": "devices/xla.py writes it, never run on hardware",
}

ENDINGS = {
    *("FP8_OVERRIDE_DGRAD", "FP8_OVERRIDE_FPROP", "FP8_OVERRIDE_WGRAD", "USE_AUTOCAST_DURING_EVAL"),
    *("USE_DYNAMIC", "USE_FULLGRAPH", "USE_MXFP8_BLOCK_SCALING", "USE_REGIONAL_COMPILATION"),
}
"""What follows a prefix such as `ACCELERATE_DYNAMO_`; an option's variable ends in it."""

SAMPLES = [
    *("true", "2", "eager", "bf16", "SHARDED_STATE_DICT", "FULL_SHARD", "TRANSFORMER_BASED_WRAP", "BACKWARD_POST"),
    *("cpu", "O1", "AO", "E4M3", "max-autotune", "alltoall", "torch", "deepspeed", "sdpa", "1.5", "word", "false", "3"),
]


@pytest.mark.parametrize("name", [name for name in NAMES if name in EFFECTS])
def test_variable_has_its_effect(name: str) -> None:
    """Set, with the others of its family where it has one, it changes what it is documented to change."""
    value, probe = EFFECTS[name]
    with patch_environment(**{name: value}):
        assert probe()


@pytest.mark.parametrize("name", [name for name in NAMES if name in OPTIONS])
def test_option_is_read_from_its_variable(name: str) -> None:
    """Some text makes the option another value than its default; where there is but one value, others are refused."""
    option = OPTIONS[name]
    values, refused = [], []
    for text in SAMPLES:
        with patch_environment(**{name: text}):
            try:
                values.append(option.read())
            except ConfigurationError as error:
                refused.append(str(error))
    one_value = len(option.choices) == 1 and any(name in message for message in refused)
    assert one_value or any(value != option.default for value in values)


def test_every_name_has_a_place() -> None:
    """No name is left out: each has an effect, hides devices, is tested elsewhere or ends an option's."""
    engines = {name for name in NAMES if name.startswith(("ACCELERATE_DEEPSPEED_", "FSDP_", "MEGATRON_LM_"))}
    placed = EFFECTS.keys() | OPTIONS.keys() | ELSEWHERE.keys() | ENDINGS | engines | set(VISIBLE.values())
    assert VISIBLE.items() <= {row.name: row.visible_variable for row in HARDWARE}.items()
    assert sorted(set(NAMES) - placed) == []
    assert sorted((EFFECTS.keys() | ELSEWHERE.keys() | ENDINGS) - set(NAMES)) == []
    assert [ending for ending in ENDINGS if not any(name.endswith(ending) for name in OPTIONS)] == []
