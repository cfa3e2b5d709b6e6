"""The planner reads headers and configurations, never weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel.__main__ import main
from accel_bigmodel.device_map.result import Plan
from accel_bigmodel.estimate import create_ascii_table, estimate_training_usage
from accel_bigmodel.plan_for import headroom_of, max_memory_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Four numbered layers of 4 KiB and an embedding, in one file."""
    state = {f"model.layers.{n}.{part}.weight": torch.zeros(16, 32) for n in range(4) for part in ("up", "down")}
    save_file({"embed.weight": torch.zeros(64, 16), **state}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_plan_is_printed_drawn_and_written(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the picture and the JSON describe one plan; numbered layers stay whole."""
    arguments = ["plan", str(checkpoint), "--max-memory", "0=16KiB,cpu=64KiB", "--svg", str(checkpoint / "p.svg")]
    assert main([*arguments, "--json", str(checkpoint / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "20.00 KiB of weights" in out
    plan = Plan.from_json((checkpoint / "p.json").read_text())
    assert plan.nbytes == 20 * 1024
    assert {part.name for part in plan.parts if part.kind == "Layer"} == {f"model.layers.{n}" for n in range(4)}
    assert {part.device for part in plan.parts} == {0, "cpu"}
    assert (checkpoint / "p.svg").read_text().startswith("<svg")


def test_only_headers_are_read(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose data is a hole of four gigabytes is planned at once."""
    count = 2**30
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    file = checkpoint / "model.safetensors"
    with open(file, "wb") as written:
        written.write(len(header).to_bytes(8, "little") + header)
        written.truncate(8 + len(header) + 4 * count)
    assert main(["plan", str(file), "--max-memory", "cpu=8GiB"]) == 0
    assert "4.00 GiB of weights" in capsys.readouterr().out


def test_memory_is_estimated_per_dtype(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each dtype has a row: the largest layer, all of it, and training with Adam."""
    assert main(["estimate-memory", str(checkpoint), "--dtypes", "float32", "int8"]) == 0
    out = capsys.readouterr().out
    assert "20.0 KB" in out
    assert "80.0 KB" in out
    assert "5.0 KB" in out
    assert "N/A" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["plan", "nowhere"], 1, "nowhere"),
        (["plan", "{}", "--max-memory", "24GiB"], 2, "DEVICE=SIZE"),
        (["plan", "{}", "--max-memory", "0=1KiB,cpu=1GiB"], 1, "No accelerator has room"),
    ],
)
def test_bad_arguments_end_with_a_message(
    arguments: list[str], status: int, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error's text stands on standard error, and the status tells its kind."""
    assert main([argument.format(checkpoint) for argument in arguments]) == status
    assert message in capsys.readouterr().err


def test_limits_are_read_from_text() -> None:
    """Devices are numbers or names, sizes are written or bytes."""
    assert max_memory_of("0=24GiB, cpu=64GiB,1=100") == {0: "24GiB", "cpu": "64GiB", 1: 100}
    assert max_memory_of(None) is None


@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("100", 100), ("0.25", 0.25), ("2GiB", "2GiB"), ("1KB", "1KB")]
)
def test_headroom_is_read_from_text(text: str | None, expected: object) -> None:
    """Bytes, a fraction of the limit, or a written size."""
    found = headroom_of(text, "anywhere")
    assert (type(found), found) == (type(expected), expected)


def test_headroom_reaches_the_plan(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for on the command line is kept free; a workload needs a configuration to trace."""
    arguments = ["plan", str(checkpoint), "--max-memory", "0=40KiB,cpu=64KiB", "--headroom"]
    assert main([*arguments, "0.25"]) == 0
    assert "10.00 KiB are kept for activations" in capsys.readouterr().out
    assert main([*arguments, "4x8"]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_training_takes_four_times_the_weights() -> None:
    """In float32 with Adam: weights, gradients and two moments; integers are not trained in."""
    assert estimate_training_usage(1000, "float32")["step"] == 4000
    assert set(estimate_training_usage(1000, "int4").values()) == {-1}


def test_tables_are_rectangular() -> None:
    """Every line is as long as the others, also under a long title."""
    lines = create_ascii_table(["a", "b"], [["1", "22"], ["333", "4"]], "a title longer than the columns").splitlines()
    assert len({len(line) for line in lines}) == 1
