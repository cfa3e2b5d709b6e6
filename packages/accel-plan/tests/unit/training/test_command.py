"""`accel plan --train` on the command line."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from accel_plan.__main__ import main
from accel_testing import requires

pytestmark = [pytest.mark.slow, requires("torch:2.13")]  # from which on several ranks are planned

MODEL = ["plan", "--train", "test_prediction:Words", "--loss", "test_prediction:next_token", "--sequence", "32"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the models of the other file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_layouts_are_compared_in_a_table_a_drawing_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table, JSON and SVG tell the same of each layout, with and without checkpointing."""
    files = ["--json", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "plan.svg")]
    assert main([*MODEL, "--batch", "4", "--layout", "single,dp2", *files]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [(row["layout"], row["checkpointing"]) for row in found["layouts"]] == [
        ("single", False), ("single", True), ("dp2", False), ("dp2", True),
    ]  # fmt: skip
    assert [line.split("  ")[0] for line in out.splitlines()[4:-2]] == [
        "single", "single, checkpointing", "dp2", "dp2, checkpointing",
    ]  # fmt: skip
    assert out.endswith(f"Wrote {files[3]}.\nWrote {files[1]}.\n")
    for row in found["layouts"]:
        assert f"{row['peak'] / 1024:.2f} KiB" in out
        assert row["peak"] == sum(row["at_peak"].values())
    drawn = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    titles = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert f"weights: {found['layouts'][0]['at_peak']['weights'] / 1024:.2f} KiB" in titles


def test_a_size_picks_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --fits the smallest layout is named; of layouts that were named, none may fit, and the status says so."""
    file = tmp_path / "plan.json"
    assert main([*MODEL, "--batch", "4", "--fits", "1GB", "--ranks", "2", "--json", str(file)]) == 0
    assert "The smallest layout that fits is single (1 rank, " in capsys.readouterr().out
    assert json.loads(file.read_text())["chosen"]["layout"] == "single"
    assert main([*MODEL, "--layout", "single", "--fits", "1000", "--checkpointing", "no"]) == 1
    assert "No layout of these fits in 1000 B." in capsys.readouterr().out
    assert main([*MODEL, "--batch", "4", "--fits", "60000", "--ranks", "2"]) == 1
    assert "No layout of these fits in 58.59 KiB." in capsys.readouterr().out


def test_pipelines_are_planned_with_their_stages_and_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each rank holds, and how long it waits under each schedule that was named: as text and JSON."""
    files = ["--json", str(tmp_path / "plan.json")]
    arguments = ["--layout", "single,pp2", "--schedule", "gpipe,1f1b", "--microbatches", "4", "--checkpointing", "no"]
    assert main([*MODEL, "--batch", "8", *arguments, *files]) == 0
    out = capsys.readouterr().out
    single, *found = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert single["pipeline"] is None
    assert [row["pipeline"]["schedule"] for row in found] == ["gpipe", "1f1b"]
    for row in found:
        plan = row["pipeline"]
        assert plan["blocks"] == [["blocks.0", "blocks.0"], ["blocks.1", "blocks.1"]]
        assert row["peak"] == max(plan["peaks"])
        name = f"pp2, {plan['schedule']}"
        assert f"{name}, 4 micro-batches: ranks wait for {plan['bubble']:.1%} of a step." in out


def test_a_checkpoint_with_headers_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Headers tell nothing of a forward pass."""
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert main(["plan", "--train", str(tmp_path), "--sequence", "8"]) == 2
    assert "Name the model as MODULE:NAME." in capsys.readouterr().err


MLP = ["test_prediction:Mlp", "--sample", "16"]
WORDS = "test_prediction:Words"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["test_prediction:Nothing", "--sequence", "8"],
            "The name of the model cannot be imported; got 'test_prediction:No",
        ),
        (["test_prediction:no_model", "--sequence", "8"], "got a int of 'test_prediction:no_model'"),
        (["torch.nn:Linear", "--sample", "64"], "The model cannot be made; got 'torch.nn:Linear': Linear.__init__()"),
        (["json:nothing", "--sequence", "8"], "has no attribute 'nothing'. Write MODULE:NAME"),
        ([*MLP, "--layout", "fdsp2"], "Did you mean 'fsdp'"),
        ([*MLP, "--layout", "dp2", "--batch", "3"], "got batch=3 for 2 of them"),
        ([*MLP, "--fits", "much"], "got 'much'"),
        ([*MLP, "--optimizer", "adamv"], "no such optimizer; got 'adamv'"),
        ([*MLP, "--optimizer", "sgd:momentum"], "got 'momentum'"),
        ([*MLP, "--optimizer", "sgd:speed=1"], "got {'foreach': True, 'speed': 1}"),
        ([*MLP, "--fits", "9" * 5000], "neither a count of bytes"),
        ([*MLP, "--json", "none/plan.json"], "gives: No such file or directory"),
        ([*MLP, "--dtype", "int8"], "got --dtype int8"),
        ([*MLP, "--loss", "json:nothing"], "The name of the loss cannot be imported"),
        # A number, a shape or a mapping that is none is named by the parser.
        ([WORDS], "one of the arguments --sequence --sample is required"),
        ([WORDS, "--sequence", "long"], "--sequence: invalid int value: 'long'"),
        ([WORDS, "--sequence", "8", "--sample", "8"], "--sample: not allowed with argument --sequence"),
        ([WORDS, "--sample", "3x?"], "--sample: invalid shape value: '3x?'"),
        ([WORDS, "--sample", "9" * 5000], "--sample: invalid shape value: '9"),
        ([WORDS, "--sample", "16", "--microbatches", "x"], "--microbatches: invalid int value: 'x'"),
        ([WORDS, "--sample", "16", "--tp-plan", "{"], "--tp-plan: invalid styles value: '{'"),
        ([WORDS, "--sample", "16", "--tp-plan", "[]"], "--tp-plan: invalid styles value: '[]'"),
        ([WORDS, "--sample", "16", "--tp-plan", "[" * 10000], "--tp-plan: invalid styles value: '[["),
        ([WORDS, "--sample", "16", "--batch", "9" * 5000], "--batch: invalid int value: '9"),
    ],
)
def test_wrong_arguments_are_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wrong argument ends with status 2, the option's name and what was got."""
    try:
        status: object = main(["plan", "--train", *given])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_model_of_transformers_is_made_of_its_configuration(tmp_path: Path) -> None:
    """A folder with a configuration is enough; the model computes its own loss."""
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "plan.json"
    arguments = ["--sequence", "16", "--batch", "4", "--layout", "fsdp2", "--checkpointing", "no"]
    assert main(["plan", "--train", str(tmp_path), *arguments, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["layouts"]
    layer = 4 * 32 * 32 + 3 * 32 * 64
    norms = 5 * 32
    assert found["most"]["gradients"] == 4 * (2 * 64 * 32 + 2 * layer + norms) // 2
    assert found["most"]["logits"] == 4 * (2 * 16 * 64 + 1), "of two sequences, and the loss"


def test_logits_that_are_not_made_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --chunk-logits a step has no whole logits, nor their gradients; a pipeline, which makes them, is refused."""
    pytest.importorskip("transformers")
    words, tokens = 4096, 2 * 64
    (tmp_path / "worded.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "def make():\n"
        f"    sizes = dict(vocab_size={words}, hidden_size=16, intermediate_size=16, num_attention_heads=2)\n"
        "    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["plan", "--train", "worded:make", "--sequence", "64", "--batch", "2", "--checkpointing", "no"]
    rows: list[list[dict[str, int]]] = []
    for given in ([], ["--chunk-logits"]):
        file = tmp_path / "plan.json"
        assert main([*asked, "--layout", "single,tp2", "--json", str(file), *given]) == 0
        rows.append(json.loads(file.read_text())["layouts"])
    for whole, chunked in zip(*rows, strict=True):
        assert whole["peak"] - chunked["peak"] > 2 * tokens * words * torch.float32.itemsize
    assert main([*asked, "--layout", "pp2", "--chunk-logits"]) == 1
