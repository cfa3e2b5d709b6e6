"""trl's trainers and its command line run on the drop-in as on Accelerate 1.15.0."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def trl_trainers(compare: Callable[[str], Any]) -> Any:
    """Return what trl's trainers found."""
    return compare("trl_trainers")


@pytest.fixture(scope="module")
def trl_trainers_ranks(trl_trainers: Any, compare: Callable[..., Any]) -> Any:
    """Return what trl's trainers found on two gloo ranks."""
    return compare("trl_trainers", 2)


@pytest.fixture(scope="module")
def trl_trainers_devices(on_devices: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what trl's trainers found on two simulated accelerators."""
    return on_devices("trl_trainers")


@pytest.fixture(scope="module")
def trl_command(compare: Callable[[str], Any]) -> Any:
    """Return what trl's command line found."""
    return compare("trl_command")


@pytest.mark.parametrize("case", ["sft", "dpo", "reward"])
def test_trainers_are_bit_equal(trl_trainers: Any, case: str) -> None:
    """Losses and weights are those of the original, bit by bit, and finite."""
    assert trl_trainers.ours[case]["finite"]
    assert trl_trainers.ours[case] == trl_trainers.theirs[case]


@pytest.mark.parametrize("case", ["sft", "dpo", "reward"])
def test_two_ranks_train_alike(trl_trainers_ranks: Any, assert_alike: Callable[..., None], case: str) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    assert_alike(trl_trainers_ranks.ours[case], trl_trainers_ranks.theirs[case])


@pytest.mark.parametrize("case", ["sft", "dpo", "reward"])
def test_two_devices_train_alike(
    trl_trainers_ranks: Any, trl_trainers_devices: dict[str, Any], assert_alike: Callable[..., None], case: str
) -> None:
    """Two simulated accelerators train as two ranks on the CPU."""
    assert_alike(trl_trainers_devices[case], trl_trainers_ranks.ours[case])


def test_launch_command_runs_in_process(trl_trainers: Any) -> None:
    """The launch command and its parser are called from Python, as trl's command line does."""
    assert trl_trainers.ours["in process"] == trl_trainers.theirs["in process"]


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


@pytest.mark.parametrize("case", ["sft", "dpo"])
def test_the_command_line_is_bit_equal(trl_command: Any, case: str) -> None:
    """`trl sft` and `trl dpo` launch, train and save to the losses and weights of the original, bit by bit."""
    assert trl_command.ours[case]["finite"]
    assert trl_command.ours[case] == trl_command.theirs[case]
