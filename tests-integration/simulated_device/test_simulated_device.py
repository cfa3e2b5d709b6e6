"""Dispatch, offload and prefetch on devices with a real limit of memory."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_core.modules.sizes import convert_file_size_to_int
from accel_testing import limits, requires
from accel_testing.programs import Program

HERE = Path(__file__).parent
pytestmark = requires("program:g++", "program:ninja")  # which build the simulated device
OUTCOMES: dict[str, dict[str, Any]] = {
    # Arithmetic across devices raises; a model over both gives its output where its input was.
    "mixed": {"caught": [True, True], "output": "cpu"},
    # The device's own error comes through, and the model runs when there is room again.
    "full": {"raised": True, "equal": True},
    # A device with room for two layers runs a model that was allowed six.
    "tight": {"equal": True},
    # Adapters over an offloaded base get the gradients they get in memory.
    "gradients": {"worst": 0.0},
    # Without hooks, weights, ties and outputs are those of before, and the device is empty.
    "back": {"equal": True, "weights": True, "tied": True, "left": 0},
    # A model loaded whole on the CPU trains on the accelerator; a frozen one computes from its weights on disk.
    "prepared": {"moved": "simgpu:0", "frozen": True, "equal": True},
}
"""What scenarios end with."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all scenarios, each pair in a process whose limit of memory it may change."""
    gathered: dict[str, Any] = {}
    Path(runpy.run_path(str(HERE / "simulated.py"))["build_folder"](), "lock").touch()  # as a killed build leaves it
    for names in (
        ("mixed", "spread", "budget", "pinned"),
        ("refused", "gradients", "back", "prepared", "unshared"),
        ("full", "experts", "exhausted"),
        ("tight",),
    ):
        words = [sys.executable, "scenario.py", str(tmp_path_factory.mktemp("scenario")), *names]
        done = limits.run(words, cwd=HERE, quiet=30, started_by=Program)
        assert done.returncode == 0, done.stderr
        gathered.update(json.loads(done.stdout.splitlines()[-1]))
    return gathered


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_scenario_ends_as_on_one_device(results: dict[str, Any], name: str) -> None:
    """Devices apart or full, gradients, hooks that are removed and models that are prepared give what is exact."""
    assert results[name] == OUTCOMES[name]


def test_a_full_device_tells_what_holds_its_memory(results: dict[str, Any]) -> None:
    """All that the device has allocated is told: the model's weights, other tensors, and what is kept for backward."""
    found = results["exhausted"]
    heading, *lines = found["told"].splitlines()
    assert heading == "Memory ran out on rank 0. What held it:"
    sizes = {line[2:18].strip(): convert_file_size_to_int("".join(line[18:].split()[:2])) for line in lines}
    assert sizes["parameters"] == pytest.approx(found["weights"], abs=10)  # KiB with two decimals
    assert sum(sizes.values()) == pytest.approx(found["used"], abs=10 * len(sizes))
    assert lines[-1].startswith("  no tensor above")
    assert sizes["no tensor above"] > 0


def test_two_devices_cpu_and_disk_work_together(results: dict[str, Any]) -> None:
    """A map over all four gives bit-equal outputs and state, keeps every limit at all times, and writes nothing."""
    found = results["spread"]
    assert found["devices"] == ["0", "1", "cpu", "disk"]
    assert found["equal"]
    assert found["within"]
    assert found["output_on"] == "cpu"
    assert found["written"] == ["model.safetensors"]
    assert (found["state on"], found["state equal"], found["state tied"]) == (["cpu"], True, True)
    # The reserve for the largest offloaded layer covers the peak; activations are a few hundred bytes.
    for peak, limit in zip(found["peaks"], found["limits"], strict=True):
        assert peak <= limit + 16 * 1024


@pytest.mark.parametrize("layers", ["1", "2", "4"])
def test_the_byte_budget_holds_on_the_device(results: dict[str, Any], layers: str) -> None:
    """The peak of the device is the budget and a few activations; after the pass nothing is left."""
    found, layer = results["budget"]["runs"][layers], results["budget"]["layer"]
    assert found["equal"]
    assert found["peak"] <= int(layers) * layer + 16 * 1024
    assert found["left"] == 0
    assert found["prefetches"] == (0 if layers == "1" else 1)


def test_a_block_larger_than_the_device_is_refused(results: dict[str, Any]) -> None:
    """The error names block, bytes needed and bytes given; nothing was moved, and the model runs."""
    found = results["refused"]
    assert len(found["told"]) == 2
    for message in found["told"]:
        assert "'layers.0.layer' of 16.25 KiB" in message
        assert "which has 8.12 KiB in all" in message
    assert found["whole"]
    assert found["used"] == 0


@pytest.mark.parametrize(("budget", "count"), [("None", 12), (str(4 * 2**14), 3), ("0", 0)])
def test_weights_that_wait_on_the_cpu_are_pinned(results: dict[str, Any], budget: str, count: int) -> None:
    """As many as a budget has room for, offloaded or loaded, with the same outputs; parameters stay what they are."""
    wanted = {"pinned": count, "equal": True}
    assert results["pinned"][budget] == {"offloaded": wanted, "loaded": wanted, "same": True}


def test_parameters_that_nobody_shares_are_not_offloaded(results: dict[str, Any]) -> None:
    """FSDP1 trained other weights than the plain model did, on one process of a GPU."""
    assert "got cpu_offload and ShardingStrategy.FULL_SHARD on 1 processes" in results["unshared"]["refused"]


@pytest.mark.parametrize("away", ["disk", "cpu"])
def test_chosen_experts_come_to_the_device_within_the_cache(results: dict[str, Any], away: str) -> None:
    """Bit for bit, in the bytes of the cache and less than an expert; guesses bring no more than they say."""
    other = "cpu" if away == "disk" else "disk"
    one, plain, ahead = results["experts"]["one"], *(results["experts"]["runs"][f"{away} {k}"] for k in (False, True))
    for found in (plain, ahead):
        assert found["off"] == 0
        # Full, but for the room of wrong guesses that were called off before they were read.
        assert 0 <= 6 * one - found["held"] <= found["wrong"] * one
        assert found["beyond"] < one
        assert found["brought"][other] == 0
    assert plain["held"] == 6 * one
    assert plain["brought"][away] == plain["missed"] > 0
    assert ahead["guessed"] > 0
    assert ahead["missed"] < ahead["brought"][away]


def test_two_ranks_save_and_load(tmp_path: Path) -> None:
    """Weights, moments and generators come back on each rank's device, whatever way they were saved and read."""
    ranks = []
    for rank in range(2):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        settings = {"ACCELERATE_DEBUG_RDV_FILE": tmp_path / "meeting", "ACCELERATE_TORCH_DEVICE": f"simgpu:{rank}"}
        ranks.append(
            Program(
                [sys.executable, "rank.py", str(tmp_path)],
                cwd=HERE,
                env=os.environ | {name: str(value) for name, value in (places | settings).items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [limits.communicate(process, quiet=18) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors for _, errors in ended)
    for rank, (output, _) in enumerate(ended):
        found = json.loads(output.splitlines()[-1])
        assert (found["rank"], found["device"], found["backend"]) == (rank, f"simgpu:{rank}", "simccl")
        assert found["current"] == rank
        assert found["placed"] == found["moments"] == [f"simgpu:{rank}"]
        assert found["differing"] == {"now None": [], "later None": [], "now on_device": [], "later cpu": []}
        assert found["asked"] == [[0, 0], [0, 0]]
        assert found["dispatched"] == ["cpu", "cpu"]
