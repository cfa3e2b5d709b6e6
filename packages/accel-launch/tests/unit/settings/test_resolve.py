"""Flag over environment over cluster over file over default, for every setting."""

import json
from pathlib import Path
from typing import Any

import pytest

from accel_core.errors import ConfigurationError
from accel_core.options.option import boolean
from accel_launch.commands.launch import launch_command_parser
from accel_launch.settings.file import read_document
from accel_launch.settings.model import Setting
from accel_launch.settings.resolve import resolve
from accel_launch.settings.resolved import Resolved
from accel_launch.settings.table import ALL, BY_KEY

PARSER = launch_command_parser()
VALUES: dict[str, tuple[str, str, str]] = {
    "tee": ("1", "2", "3"),
    "rdzv_conf": ("a=1", "a=2", "a=3"),
    "slurm": ("time=10", "time=20", "time=30"),
    "ray": ("pip=a", "pip=b", "pip=c"),
}


def three(setting: Setting) -> tuple[str, str, str]:
    """Return three texts that the setting takes, different where it has so many."""
    if setting.key in VALUES:
        return VALUES[setting.key]
    if setting.key == "fp8_override_linear_precision":
        return "true,true,true", "true,false,false", "false,false,true"
    if setting.choices:
        choices = [str(choice) for choice in setting.choices]
        return choices[0], choices[-1], choices[len(choices) // 2]
    if setting.default in ("true", "false") or setting.yes_or_no:
        return "true", "false", "true"
    try:
        setting.parse("3")
        numbers = ("3", "4", "5")
        return numbers
    except ValueError:
        return "true", "false", "true"


def words(setting: Setting, text: str) -> list[str]:
    """Return the command line that says the setting."""
    return [setting.words[-1]] if setting.kind in ("switch", "off-switch") else [setting.words[-1], text]


def what_file_says(setting: Setting, text: str) -> dict[str, Resolved]:
    """Return what a file with the setting on its last line says; none can say a setting without a place in files."""
    if not setting.path:
        return {}
    *group, key = setting.path
    lines = [f"{name}:" for name in group] + [f"{'  ' * len(group)}{key}: {json.dumps(text)}"]
    said = read_document("\n".join(lines), Path("config.yaml")).settings_of(set())
    assert said[setting.key].where == f"config.yaml:{len(lines)}"
    return {setting.key: said[setting.key]}


@pytest.mark.parametrize("key", BY_KEY)
def test_stronger_source_wins(key: str) -> None:
    """Each source wins over all weaker ones, and says where it is."""
    setting = BY_KEY[key]
    by_flag, by_environment, by_file = three(setting)
    silent, said = PARSER.parse_args(["s.py"]), PARSER.parse_args([*words(setting, by_flag), "s.py"])
    file = what_file_says(setting, by_file)
    environment = {setting.environment: by_environment} if setting.environment else {}
    expected: list[tuple[Any, dict[str, str], dict[str, Resolved], str]] = [
        (said, environment, file, "flag"),
        (silent, environment, file, "environment" if environment else "file" if file else "default"),
        (silent, {}, file, "file" if file else "default"),
        (silent, {}, {}, "default"),
    ]
    for args, variables, contents, origin in expected:
        found = resolve(ALL, args, environment=variables, file=contents)[key]
        assert found.origin == origin
        assert [weaker.origin for weaker in found.overridden] == [
            name
            for name in ("environment", "file", "default")
            if {"environment": bool(variables), "file": bool(contents), "default": True}[name] and name != origin
        ]
    resolved = resolve(ALL, silent, environment=environment, file={})[key]
    if setting.environment:
        assert (resolved.value, resolved.where) == (setting.parse(by_environment), setting.environment)
    if file:
        by_file_alone = resolve(ALL, silent, environment={}, file=file)[key].value
        assert by_file_alone == ([by_file] if setting.kind == "append" else setting.parse(by_file))
    assert resolve(ALL, silent, environment={}, file={})[key].value == setting.default


def test_settings_that_one_source_cannot_say() -> None:
    """Every setting has a flag; those without a variable or a place in files are listed, and no others."""
    assert all(setting.words for setting in BY_KEY.values())
    about_the_command = {"module", "no_python", "quiet", "explain", "all", "dry_run", "json"}
    assert {key for key, setting in BY_KEY.items() if not setting.environment} == {
        *about_the_command,
        *("vm", "env", "slurm", "ray"),
    }
    hardware = {"multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config"}
    per_launch = {
        "nproc_per_node",
        "nnodes",
        "config_file",
        "tee",
        "log_dir",
        "watchdog",
        "role",
        "rdzv_conf",
        "all_frames",
    }
    per_launch |= {
        "launcher",
        "slurm",
        "address",
        "ray",
        "rdzv_id",
        "max_restarts",
        "monitor_interval",
        "aws_access_key_id",
        "aws_secret_access_key",
    }
    per_launch |= {"replicas", "min_replicas"} & BY_KEY.keys()  # of accel-torchft
    assert {key for key, setting in BY_KEY.items() if not setting.path} == about_the_command | hardware | per_launch


WRONG = {int: "many", float: "much", boolean: "perhaps"}


@pytest.mark.parametrize("key", [key for key, row in BY_KEY.items() if row.kind == "value"])
def test_wrong_type_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag with a word that it cannot take ends with status 2 and names flag and word; a text takes any."""
    setting = BY_KEY[key]
    word = "no such choice" if setting.choices else WRONG.get(setting.parse, "no, neither, nor")
    try:
        setting.parse(word)
        takes = not setting.choices
    except ValueError:
        takes = False
    if takes:
        assert getattr(PARSER.parse_args([setting.words[-1], word]), key) == setting.parse(word)
        return
    with pytest.raises(SystemExit) as ended:
        PARSER.parse_args([setting.words[-1], word])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert setting.words[-1] in said
    assert word.upper() in said.upper()


def test_cluster_stands_between_environment_and_file() -> None:
    """A scheduler's variables win over the file and lose against accel's own."""
    args = launch_command_parser().parse_args(["s.py"])
    cluster = {"num_machines": Resolved(3, "cluster", "SLURM_STEP_NUM_NODES")}
    file = {"num_machines": Resolved(5, "file", "config.yaml:1")}
    assert resolve(ALL, args, environment={}, cluster=cluster, file=file)["num_machines"].value == 3
    variables = {"ACCEL_NUM_MACHINES": "2"}
    assert resolve(ALL, args, environment=variables, cluster=cluster, file=file)["num_machines"].value == 2


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("ACCEL_NUM_PROCESSES", "many", "a whole number"),
        ("ACCELERATE_MIXED_PRECISION", "fp7", "Give it one of no, fp16, bf16, fp8"),
        ("ACCELERATE_USE_CPU", "perhaps", "yes or no"),
    ],
)
def test_variable_that_cannot_be_read_is_named(name: str, text: str, told: str) -> None:
    """A variable with a wrong value is an error with its name, the text and what is wanted."""
    args = launch_command_parser().parse_args(["s.py"])
    with pytest.raises(ConfigurationError, match=name) as caught:
        resolve(ALL, args, environment={name: text})
    assert told in str(caught.value)
    assert text in str(caught.value)


def test_program_may_change_the_namespace() -> None:
    """What a program writes into parsed arguments counts as said."""
    args = launch_command_parser().parse_args(["s.py"])
    args.num_processes = 4
    assert resolve(ALL, args, environment={"ACCEL_NUM_PROCESSES": "2"})["num_processes"].value == 4
