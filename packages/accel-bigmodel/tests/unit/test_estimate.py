"""What a model takes is told per dtype; where a model cannot be had, one line says why, at once."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel.__main__ import main
from accel_bigmodel.estimate import create_ascii_table, estimate_training_usage
from accel_testing import limits

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the library transformers, not installed here"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of 20 KiB in float32."""
    save_file(
        {"embed.weight": torch.zeros(64, 16), "head.weight": torch.zeros(128, 32)}, tmp_path / "model.safetensors"
    )
    return tmp_path


def test_memory_is_estimated_per_dtype(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each dtype has a row: the largest layer, all of it, and training with Adam, in the units that are counted in."""
    assert main(["estimate-memory", str(checkpoint), "--dtypes", "float32", "int8"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["float32", "16.00 KiB", "20.00 KiB", "80.00 KiB"] in rows
    assert ["int8", "4.00 KiB", "5.00 KiB", "N/A"] in rows


def test_every_dtype_of_torch_is_counted(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Floating point and integer dtypes count by their bits, under each of their names."""
    dtypes = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    words = [name for name, dtype in dtypes.items() if dtype.is_floating_point or "torch.int" in str(dtype)]
    assert main(["estimate-memory", str(checkpoint), "--dtypes", *words, "uint64", "torch.bfloat16"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    totals = {row[0]: row[2] for row in rows if len(row) == 4}
    assert totals.keys() >= {*words, "torch.bfloat16"}
    assert totals["double"] == "40.00 KiB"
    assert totals["bfloat16"] == totals["torch.bfloat16"] == totals["half"] == totals["short"] == "10.00 KiB"
    assert totals["float8_e4m3fn"] == totals["int8"] == "5.00 KiB"
    assert totals["uint64"] == "40.00 KiB"
    assert totals["int4"] == totals.get("float4_e2m1fn_x2", "2.50 KiB") == "2.50 KiB"  # the latter from torch 2.8 on


@pytest.mark.parametrize("word", ["bf16", "complex64", "bool", "nn"])
def test_an_unknown_dtype_is_refused_in_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is looked for; the line lists what is known."""
    assert main(["estimate-memory", "nowhere", "--dtypes", "float32", word]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"got {word!r}" in said
    assert "bfloat16, " in said


def test_training_takes_four_times_the_weights() -> None:
    """In float32 with Adam: weights, gradients and two moments; integers are not trained in."""
    assert estimate_training_usage(1000, "float32")["step"] == 4000
    assert set(estimate_training_usage(1000, "int4").values()) == {-1}


def test_tables_are_rectangular() -> None:
    """Every line is as long as the others, also under a long title."""
    lines = create_ascii_table(["a", "b"], [["1", "22"], ["333", "4"]], "a title longer than the columns").splitlines()
    assert len({len(line) for line in lines}) == 1


@needs_transformers
@pytest.mark.parametrize(("name", "status"), [("owner/tiny", 0), ("nobody-has/such-a-model", 1)])
def test_without_a_network_the_cache_counts(
    name: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hub's cache holds is counted, in a process of its own, and an unknown name is one line."""
    folder = tmp_path / "models--owner--tiny"
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    ended = limits.run([sys.executable, "-m", "accel_bigmodel", "estimate-memory", name], quiet=12)
    assert ended.returncode == status, ended.stderr
    assert name in (ended.stderr if status else ended.stdout)
    assert not status or ended.stderr.splitlines()[-1].startswith("The hub did not return the configuration of")


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_missing_library_is_one_line(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names it, and how to get it."""
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["estimate-memory", "nobody-has/such-a-model", "--library-name", library]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"needs {library}, which is not installed. Install it" in said


@needs_transformers
def test_a_library_that_lacks_another_is_one_line() -> None:
    """Transformers cannot be imported without the hub's own library: that one is named, in a process that lacks it."""
    hidden = "import sys; sys.modules['huggingface_hub'] = None; from accel_bigmodel.__main__ import main; "
    command = [sys.executable, "-c", hidden + "sys.exit(main())", "estimate-memory", "nobody-has/such-a-model"]
    ended = limits.run(command, quiet=12)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert "huggingface_hub" in ended.stderr
    assert ended.stderr.endswith("Install it.\n")


@needs_transformers
def test_a_damaged_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A local configuration that is no JSON is named, and not looked for at the hub."""
    (tmp_path / "config.json").write_text("{")
    assert main(["estimate-memory", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path) in said
