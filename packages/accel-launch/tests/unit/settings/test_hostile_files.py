"""Configuration files that are broken, hostile or random: one line that names the file."""

import json
import random
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.commands.configure import configure
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.checks import check_settings
from accel_launch.settings.config import load_config_from_file
from accel_launch.settings.file import load
from accel_testing import requires

HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "list that contains itself": ("a: &a [*a]\ncommands: 1\n", "unknown key `a`"),
    "deep lists": ("[" * 100_000, "recursion"),
    "deep maps": ("{a: " * 9000, "recursion"),
    "not UTF-8": (b"use_cpu: \xff\n", "not UTF-8 at byte 9"),
    "NUL": ("a: \0", "special characters"),
    "number for a key": ("1: 2\n", "unknown key `1`"),
    "nothing for a key": ("null: 1\n", "unknown key `None`"),
    "truth for a key": ("true: 1\n", "unknown key `True`"),
    "number for an inner key": ("dynamo_config:\n  1: 2\n", "unknown key `dynamo_config.1`"),
    "list for a key": ("? [1]\n: 2\n", "unhashable"),
    "5,000 digits": (f"num_processes: {'9' * 5000}\n", "integer string conversion"),
    "no such day": ("num_processes: 2020-99-99\n", "month must be in"),
    "tag of a number": ("num_processes: !!int many\n", "invalid literal for int.*'many'"),
    "tag of a class": ("a: !!python/object/apply:os.system [exit]\n", "could not determine a constructor"),
    "several documents": ("use_cpu: true\n---\nuse_cpu: false\n", "another document"),
    "group for a value": ("gpu_ids: {a: 1}\n", "takes one value"),
    "lists in a list": ("tpu_vm: [[1]]\n", "takes one value"),
    "value for a group": ("dynamo_config: [1]\ndynamo_backend: EAGER\n", "groups settings"),
    "no such place": ("compute_environment: MARS\n", "compute_environment cannot be MARS"),
    "group for a place": ("compute_environment: {a: 1}\n", "compute_environment cannot be"),
    "long key": ("k" * 900 + ": 1\n", "unknown key `kkk"),
    "key of several lines": ('"a\\nb": 1\n', "unknown key"),
}


def use(path: Path) -> None:
    """Do all that is done with a configuration file."""
    load_config_from_file(path)
    file = load(path)
    assert file is not None
    json.dumps(file.config)
    args = launch_command_parser().parse_args(["--config-file", str(path), "s.py"])
    check_settings(settings_from(args))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(tmp_path: Path, name: str) -> None:
    """A file that is not valid is one error of one line, with the file and what is wrong in it."""
    content, told = HOSTILE[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=told) as caught:
        use(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "config.yaml" in str(caught.value)


@requires("engine:fsdp")
def test_aliases_and_merges_mean_what_yaml_says(tmp_path: Path) -> None:
    """Aliases and merge keys of an ordinary size are read; what one section migrates does not change another."""
    path = tmp_path / "config.yaml"
    path.write_text("fsdp_config: &a\n  fsdp_version: 2\nparallelism_config:\n  parallelism_config_tp_size: &two 2\n")
    path.write_text(path.read_text() + "num_processes: *two\n<<: {use_cpu: true}\n")
    file = load(path)
    assert file is not None
    said = file.settings_of(set())
    assert (said["num_processes"].value, said["cpu"].value, said["fsdp_version"].value) == (2, True, "2")


PIECES = [
    "9" * 99, "é", "auto", "FSDP", "AMAZON_SAGEMAKER", "<<: {a: 1}", "|\n  x",
    "true", "null", "-1", "1e99", ".nan", "0x1F", "190:20:30", "''", "[]", "{}", "[1, {a: b}]", "{1: 2}",
    "!!int a", "&x [1]", "*x",
]  # fmt: skip
CONFIGS = sorted((Path(__file__).parents[2] / "peer" / "configs").glob("*.y*ml"))


def damaged(text: str, chance: random.Random) -> bytes:
    """Return a file of which lines, values and bytes were changed."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 2)):
        place = chance.randrange(len(lines))
        key, _, value = lines[place].partition(":")
        lines[place] = chance.choice(
            [
                f"{key}: {chance.choice(PIECES)}",
                f"{chance.choice(PIECES)}:{value}",
                f"  {lines[place]}",
                lines[place].lstrip(),
                f"{lines[place]}\n{lines[chance.randrange(len(lines))]}",
                f"{key}{chance.choice('_x[:{')}: {value}",
                "",
            ]
        )
    raw = bytearray("\n".join(lines).encode())
    for _ in range(chance.choice([0, 0, 1]) if raw else 0):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_damaged_files(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed in a file, it is read, or refused in one line by an error of accel; both often."""
    monkeypatch.setattr("accel_core.host.environ.snapshot", dict)
    chance = random.Random(seed)
    told = []
    for _ in range(200):
        path = tmp_path / "config.yaml"
        path.write_bytes(damaged(chance.choice(CONFIGS).read_text(), chance))
        try:
            use(path)
        except (ConfigurationError, MissingDependencyError) as error:
            told.append(str(error))
    assert 0 < len(told) < 200
    assert not any("\n" in message for message in told)


@pytest.mark.parametrize("pair", ["use_cpu.x=1", "a.b.c", "num_processes=²", "=3"])
def test_pairs_that_cannot_be_meant(tmp_path: Path, variables: dict[str, str], pair: str) -> None:
    """`accel config --set` refuses what is no pair, what reaches into a value, and keys that nobody knows."""
    words = ["config", "--config-file", str(tmp_path / "c.yaml"), "--yes", "--set", pair]
    from accel_launch.cli import build_parser, find_command

    with pytest.raises(ConfigurationError):
        configure(build_parser(find_command("config")).parse_args(words[1:]))
    assert not (tmp_path / "c.yaml").exists()
