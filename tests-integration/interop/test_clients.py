"""transformers, peft, trl, diffusers, sentence-transformers and setfit on the drop-in as on Accelerate 1.15.0."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TRAINED = ("plain", "accumulation", "split", "dispatch")
KINDS = ("pickled", "stream evaluation", "dispatched stream", "sharded stream", "compiled", "subclassed")
"""Streams, also to evaluate, compiled models, subclassed Accelerators and pickled trainers."""
TUNED = ("sft", "dpo", "reward")
ENCODED = ("similarity", "ranking", "resumed")
LOOPS = {"adapters": ("lora", "dropout in bf16", "dora"), "diffusion_loop": ("loop", "loop in bf16")}
ONE_PROCESS = {
    "trainer": (
        *TRAINED, "short window", "bf16", "clipping", "stream", "unseeded", "checkpointing", "evaluate", "resume",
        "find batch size",
    ),
    "trainer_kinds": KINDS,
    "offload": ("reload", "auto", "adapters", "limited"),
    "trl_trainers": (*TUNED, "in process"),
    "trl_command": ("sft", "dpo"),
    "diffusion": ("pipeline", "device maps"),
    "evaluation": ("likelihoods",),
    "encoder": ("encode", *ENCODED),
    "fewshot": ("straight", "resumed"),
    **LOOPS,
}  # fmt: skip
TWO_RANKS = {
    "trainer_ranks": (*TRAINED, "uneven evaluation"),
    "trainer_kinds": KINDS,
    "trl_trainers": TUNED,
    "encoder": ENCODED,
    **LOOPS,
}
TWO_DEVICES = {
    **{name: tuple(case for case in cases if "bf16" not in case) for name, cases in TWO_RANKS.items()},
    "trainer_ranks": (*TWO_RANKS["trainer_ranks"], "evaluated first"),
}
del TWO_DEVICES["trainer_kinds"]
Ask = Callable[..., Any]


def over(table: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """Return the mark that runs a test over clients and their cases."""
    return pytest.mark.parametrize(("client", "case"), [(name, case) for name in table for case in table[name]])


@over(ONE_PROCESS)
def test_one_process_is_bit_equal(compare: Ask, client: str, case: str) -> None:
    """Losses, norms, outputs, weights, files and placement are those of the original, bit by bit, and finite."""
    ours, theirs = (side[case] for side in compare(client))
    assert ours == theirs
    assert client not in LOOPS or ours["restored"] != ours["weights"]
    if isinstance(ours, dict):
        assert ours.get("finite", True)


@over(TWO_RANKS)
def test_two_ranks_train_alike(compare: Ask, assert_alike: Ask, client: str, case: str) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    pair = compare(client, 2)
    assert_alike(pair.ours[case], pair.theirs[case])


@over(TWO_DEVICES)
def test_two_devices_train_alike(compare: Ask, on_devices: Ask, assert_alike: Ask, client: str, case: str) -> None:
    """Two simulated accelerators train, save and load as two ranks on the CPU."""
    assert_alike(on_devices(client)[case], compare(client, 2).ours[case])


@pytest.mark.parametrize("case", TRAINED)
def test_two_ranks_train_like_one(compare: Ask, alone: Ask, assert_close: Ask, case: str) -> None:
    """Two ranks that share the batches of one process train to its losses and weights, to single precision."""
    ours = compare("trainer_ranks", 2).ours[case]
    assert_close(ours, alone("trainer_ranks")[case], "losses", "evaluation", "weights")


def test_two_ranks_agree_after_an_evaluation(compare: Ask) -> None:
    """An evaluation before training does not part the ranks, as it does in the original."""
    ours = compare("trainer_ranks", 2).ours
    first, plain = ours["evaluated first"], ours["plain"]
    assert first["ranks agree"]
    assert first["weights"] == pytest.approx(plain["weights"], rel=1e-4, abs=1e-5)


def test_a_resumed_run_ends_as_the_other(compare: Ask) -> None:
    """Trainers that go on from a checkpoint end with the weights of a run that was not interrupted."""
    assert compare("trainer").ours["resume"]["equal"]
    encoder, fewshot = compare("encoder").ours, compare("fewshot").ours
    assert encoder["resumed"] == encoder["ranking"]
    assert fewshot["resumed"].items() <= fewshot["straight"].items()


def test_offloading_changes_nothing(compare: Ask) -> None:
    """A model with layers on disk, also by a limit in words, answers, saves and merges like the whole one."""
    ours = compare("offload").ours
    assert ours["reload"]["same"]
    assert ours["adapters"]["offloaded equals whole"]
    assert ours["adapters"]["outputs from disk"] == ours["adapters"]["outputs"]
    assert "disk" in ours["limited"]["map"].values()
    assert ours["limited"]["tokens"] == ours["auto"]["tokens"]


def test_a_pipeline_with_hooks_becomes_a_graph(compare: Ask) -> None:
    """It is exported, as on the original, and also compiled whole and traced with the weights of an offloaded model."""
    ours, theirs = compare("diffusion")
    assert theirs["graphs"]["exported"]
    assert ours["graphs"] == {"exported": True, "traced": True, "compiled whole": True}


@pytest.fixture
def diffusion_offload(compare: Ask) -> Any:
    """Return what diffusers found on a simulated accelerator."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("the simulated accelerator is built by g++ and ninja, and one of them is not installed")
    return compare("diffusion_offload")


@pytest.mark.parametrize(
    "case", ["model offload", "sequential offload", "device map", "device map with CPU and disk", "balanced"]
)
def test_diffusers_offloads_to_an_accelerator(diffusion_offload: Any, case: str) -> None:
    """Images are those of the whole pipeline, bit by bit, and models lie where they lie on the original."""
    ours, theirs = ({name: found for name, found in side[case].items() if name != "peak"} for side in diffusion_offload)
    assert ours["equal"]
    assert ours == theirs


def test_diffusers_needs_less_memory_offloaded(diffusion_offload: Any) -> None:
    """Offloaded models take the original's memory; layers that travel ahead take more, but less than their model."""
    ours, theirs = diffusion_offload
    for case in ("model offload", "device map", "balanced"):
        assert ours[case]["peak"] <= theirs[case]["peak"]
    assert ours["sequential offload"]["peak"] < ours["model offload"]["peak"]


def test_file_for_one_gpu_starts_one_process(tmp_path: Path) -> None:
    """The file `single_gpu.yaml` of trl, which says NO and eight processes, starts one."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    config = Path(spec.origin).parent / "accelerate_configs" / "single_gpu.yaml"
    assert "num_processes: 8" in config.read_text()
    (tmp_path / "s.py").write_text("import os; print('ranks', os.environ.get('WORLD_SIZE', '1'))")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), str(tmp_path / "s.py")]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "ranks 1\n"
