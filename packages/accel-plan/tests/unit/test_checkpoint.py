"""The planner reads headers and configurations, never weights."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accel_core.checkpoint.weights import save_model
from accel_plan.__main__ import main
from accel_plan.checkpoint import headroom_of, max_memory_of
from accel_plan.device_map import Plan
from accel_testing.requires import requires

LONG = "9" * 5000
"""A number that Python refuses to read."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Four numbered layers of 4 KiB and an embedding, in one file."""
    state = {f"model.layers.{n}.{part}.weight": torch.zeros(16, 32) for n in range(4) for part in ("up", "down")}
    save_file({"embed.weight": torch.zeros(64, 16), **state}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_plan_is_printed_drawn_and_written(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, picture, JSON and text describe one plan, with what is kept free; numbered layers stay whole."""
    arguments = ["plan", str(checkpoint), "--max-memory", "0=16KiB,cpu=64KiB", "--svg", str(checkpoint / "p.svg")]
    assert main([*arguments, "--json", str(checkpoint / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "20.00 KiB of weights" in out
    plan = Plan.from_json((checkpoint / "p.json").read_text())
    assert plan.nbytes == 20 * 1024
    assert {part.name for part in plan.parts} == {"embed", *(f"model.layers.{n}" for n in range(4))}
    assert {part.device for part in plan.parts} == {0, "cpu"}
    assert (checkpoint / "p.svg").read_text().startswith("<svg")
    assert out.endswith(f"Wrote {checkpoint / 'p.svg'}.\nWrote {checkpoint / 'p.json'}.\n")
    assert main(["plan", str(checkpoint), "--max-memory", "0=8KiB,1=8KiB,cpu=64KiB"]) == 0
    out = capsys.readouterr().out
    assert "0 holds 1 part of 4.00 KiB: embed." in out
    assert "1 holds 2 parts of 8.00 KiB: model.layers.0-1." in out
    assert "cpu holds 2 parts of 8.00 KiB: model.layers.2-3." in out
    assert main(["plan", str(checkpoint), "--max-memory", "cpu=64KiB"]) == 0
    assert "parts of 20.00 KiB: the whole model." in capsys.readouterr().out
    assert main(["plan", str(checkpoint), "--max-memory", "0=40KiB,cpu=64KiB", "--headroom", "0.25"]) == 0
    assert "10.00 KiB are kept for activations" in capsys.readouterr().out


@requires("accel_parallel")
def test_help_of_each_plan_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan -h` is about placing weights and `plan-training -h` about training; `plan --train` is still read."""
    shown = []
    for command in ("plan", "plan-training"):
        with pytest.raises(SystemExit):
            main([command, "-h"])
        shown.append(capsys.readouterr().out)
    assert ["--headroom" in text for text in shown] == [True, False]
    assert ["--layout" in text for text in shown] == [False, True]
    for words in (["plan", "--train"], ["plan-training"]):
        with pytest.raises(SystemExit, match="2"):
            main([*words, "torch.nn:Identity", "--batch", "many"])
        assert "argument --batch: invalid int value: 'many'" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["plan", "nowhere"], 1, "nowhere"),
        (["plan", "{}", "--max-memory", "24GiB"], 2, "DEVICE=SIZE"),
        (["plan", "{}", "--max-memory", "0=1KiB,cpu=1GiB"], 1, "No accelerator has room"),
        (["plan", "{}", "--expert-cache", "1MiB"], 2, "no experts were found"),
        (["plan"], 2, "got none. Name a file or folder"),
        (["plan", "{}", "--balanced", "--train", "--sample", "8"], 2, "no options; got --balanced. Write"),
        (["plan", "{}", "--json", "{}/none/plan.json"], 2, "plan.json gives: No such file or directory"),
        (["plan", "{}", "--svg", "{}"], 2, "gives: Is a directory"),
        (["plan", "{}", "--max-memory", f"cpu={LONG}"], 2, "neither a count of bytes"),
        (["plan", "{}", "--max-memory", f"cpu={LONG}GiB"], 2, "neither a count of bytes"),
        (["plan", "{}", "--max-memory", f"{LONG}=1GiB"], 2, "is not recognized"),
        (["plan", "{}", "--max-memory", "0=40KiB,cpu=64KiB", "--headroom", "4x8"], 2, "no config.json"),
        (["plan", "{}", "--headroom", LONG], 2, "neither a count of bytes"),
        (["plan", "{}", "--headroom", f"{LONG}x2"], 2, "neither a count of bytes"),
        (["plan", "{}", "--expert-cache", LONG], 2, "no experts were found"),
        # A module that is not there, no name, a function that wants arguments, and one that makes something else.
        (["plan", "{}", "--model", "nowhere:Net"], 2, "nowhere"),
        (["plan", "{}", "--model", "json"], 2, "'json'"),
        (["plan", "{}", "--model", "json:dumps"], 2, "missing 1 required"),
        (["plan", "{}", "--model", "os:getcwd"], 2, "got a str of"),
    ],
)
def test_bad_arguments_end_with_a_message(
    arguments: list[str], status: int, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error's text stands on standard error, and the status tells its kind."""
    assert main([argument.format(checkpoint) for argument in arguments]) == status
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@requires("accel_parallel")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "A Python file is not a checkpoint; got 'train.py'"),
        (["--train", "train.py", "--sample", "64"], "Name a class or function of it"),
        (["--train", "m:Net", "--batch", "x", "--sample", "64"], "--batch: invalid int value: 'x'"),
        (["--train", "m:Net", "--sample", "64", "--layout", "fdsp2"], "Did you mean 'fsdp'"),
        (["--train", "m:Net"], "one of the arguments --sequence --sample is required"),
        (["m:Net", "--layout", "fsdp2"], "unrecognized arguments: --layout fsdp2"),
        (["--train", "m:Net", "--sample", "64", "--balanced"], "unrecognized arguments: --balanced"),
    ],
)
def test_arguments_are_looked_at_before_torch_is_imported(arguments: list[str], message: str) -> None:
    """A slip on the command line is named at once, not after the seconds that torch takes."""
    code = (
        "import sys\nfrom accel_plan.__main__ import main\n"
        f"try:\n    sys.exit(main({['plan', *arguments]}))\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (max_memory_of, "0=24GiB, cpu=64GiB,1=100", {0: "24GiB", "cpu": "64GiB", 1: 100}),
        (max_memory_of, None, None), (headroom_of, None, None), (headroom_of, "100", 100), (headroom_of, "0.25", 0.25),
        (headroom_of, "2GiB", "2GiB"), (headroom_of, "1KB", "1KB"),
    ],
)  # fmt: skip
def test_sizes_are_read_from_text(read: Callable[[str | None], object], text: str | None, expected: object) -> None:
    """Devices are numbers or names; headroom is bytes, a fraction of the limit, or a written size."""
    found = read(text)
    assert (type(found), found) == (type(expected), expected)


class Block(nn.Module):
    """Two layers, which stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the layers' output to the input."""
        return x + self.down(torch.relu(self.up(x)))


class Nested(nn.Module):
    """Its order is not that of its names, it has more than ten blocks in two places, and a head tied to the front."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.encoder = nn.ModuleDict({"stack": nn.Sequential(*[Block() for _ in range(12)])})
        self.decoder = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(8, 32, bias=False)
        self.register_buffer("scale", torch.ones(8))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Score every word."""
        return self.head(self.decoder(self.encoder["stack"](self.words(words) * self.scale)))


LIMITS = "0=9KiB,1=5KiB,cpu=4KiB"
BYTES: dict[int | str, int | str] = {0: "9KiB", 1: "5KiB", "cpu": "4KiB"}
WORDS = torch.arange(32)[None]


def untied() -> Nested:
    """Make the model without a tie."""
    return Nested(tied=False)


@pytest.mark.parametrize(("name", "make"), [("Nested", Nested), ("untied", untied)])
def test_a_plan_of_a_model_is_the_map_of_its_loading(
    name: str, make: type[Nested], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nested, tied and not: named on the command line, the model is placed as `infer_auto_device_map` places it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    save_model(make(), None, tmp_path / "saved", max_shard_size="4KB")
    file = tmp_path / "plan.json"
    arguments = ["plan", str(tmp_path / "saved"), "--max-memory", LIMITS, "--whole", "Block", "--json", str(file)]
    assert main([*arguments, "--model", f"test_checkpoint:{name}"]) == 0
    assert "planned by name" not in capsys.readouterr().out
    with init_empty_weights():
        empty = make()
    expected = infer_auto_device_map(empty, dict(BYTES), no_split_module_classes=["Block"])
    found = Plan.from_json(file.read_text()).device_map
    assert list(found.items()) == list(expected.items())
    assert len(set(found.values())) == 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_plan_of_a_configuration_is_the_map_of_its_loading(tied: bool, tmp_path: Path) -> None:
    """The class that config.json names, in its dtype: the same parts in the same order on the same devices."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, not installed here")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cpu"):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    with init_empty_weights():
        real = transformers.AutoModelForCausalLM.from_config(config)
    limits: dict[int | str, int | str] = {0: "20KiB", 1: "12KiB", "cpu": "16KiB"}
    expected = infer_auto_device_map(real, dict(limits), no_split_module_classes=real._no_split_modules)
    file = tmp_path / "plan.json"
    assert main(["plan", str(tmp_path), "--max-memory", "0=20KiB,1=12KiB,cpu=16KiB", "--json", str(file)]) == 0
    plan = Plan.from_json(file.read_text())
    assert list(plan.device_map.items()) == list(expected.items())
    assert len(set(expected.values())) > 2


@pytest.mark.parametrize("shard", ["10GB", "4KB"])
def test_a_plan_of_headers_says_that_it_knows_no_order(
    shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks are numbered, tied weights are together, the order is said to be unknown; the map loads the model."""
    plain = Nested().eval()
    save_model(plain, None, tmp_path, max_shard_size=shard)
    file = tmp_path / "plan"
    assert main(["plan", str(tmp_path), "--max-memory", "cpu=8KiB", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "the plan goes by name" in out
    assert "encoder.stack.0-" in out
    plan = Plan.from_json(file.read_text())
    blocks = [part.name for part in plan.parts if part.name.startswith("encoder")]
    assert blocks == [f"encoder.stack.{number}" for number in range(12)]
    assert plan.nbytes == sum(value.nbytes for value in (*plain.parameters(), *plain.buffers()))
    places = {part.name.partition(".")[0]: part.device for part in plan.parts}
    assert places["head"] == places["words"]
    with init_empty_weights():
        empty = Nested().eval()
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, device_map=plan.device_map)
    assert torch.equal(loaded(WORDS), plain(WORDS))


@requires("transformers")
def test_a_plan_with_a_cache_says_what_a_token_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a configuration alone: dense parts on the accelerator, experts on the disk, and the bytes of a token."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=64, architectures=["MixtralForCausalLM"]).save_pretrained(
        tmp_path
    )
    arguments = ["plan", str(tmp_path), "--max-memory", "0=2MiB,cpu=1MiB", "--dtype", "float32"]
    assert main([*arguments, "--expert-cache", "192KiB"]) == 0
    out = capsys.readouterr().out
    assert "16 experts of up to 96.00 KiB take 1.50 MiB, of which a cache of 192.00 KiB holds 12%" in out
    assert "A token brings 384.00 KiB while the cache is empty, and 336.00 KiB once" in out
