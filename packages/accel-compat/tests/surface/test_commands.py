"""Every option of the original's command line is one of the same command here, with the same name and default."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_core.errors import MissingDependencyError
from accel_core.options.engines import absent
from accel_launch.cli import build_parser, find_command
from accelerate.commands.merge import merge_command_parser
from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser

CLI = json.loads(Path(__file__).with_name("surface.json").read_text())["cli"]

OWN = {"merge-weights": merge_command_parser, "to-fsdp2": to_fsdp2_command_parser}
"""Parsers of the commands that the drop-in alone has."""

DIFFERENT = {
    "config default --config_file": "default: the place depends on the environment and is looked up when it is written",
    "config update --config_file": "default: none of its own, so that a file named before the word `update` counts",
    "estimate-memory --dtypes": "choices: all dtypes of torch are taken, and looked up where torch is",
    "launch --num_machines": "default: 1, which the original puts in later",
    "launch --dynamo_backend": "choices: one that the original misspells, and two of its own list that it leaves out",
    "launch training_script": "nargs: --explain shows the settings without a script",
}
"""Options that differ, and in what."""


def options(node: dict[str, Any], words: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk over the options of all commands, each with the words that lead to it."""
    for option in node["options"]:
        yield " ".join((*words, max(option["flags"][0], option["flags"][-1], key=len))), option
    for name, inner in node.get("subcommands", {}).items():
        yield from options(inner, (*words, name))


OPTIONS = dict(options(CLI))


def parser_of(words: list[str]) -> Any:
    """Return the parser of a command or of one below it."""
    parser = OWN[words[0]]() if words[0] in OWN else build_parser(find_command(words[0]))
    for word in words[1:]:
        subparsers = next(action for action in parser._actions if action.dest == "subcommand")
        parser = subparsers.choices[word]
    return parser


@pytest.mark.parametrize("place", OPTIONS)
def test_option_of_the_original_is_here(place: str) -> None:
    """Flags in both spellings, destination, default, choices and number of values are the original's, or listed.

    Where the original takes any text and finds out later, accel may name the choices. An option of an engine whose
    package is not installed names the package.
    """
    words, option = place.split()[:-1], OPTIONS[place]
    parser = parser_of(words)
    for known in absent():
        own = known.options and re.fullmatch(known.options, option["dest"])
        if own or option["dest"].startswith(f"{known.word}_"):  # named whether the engine's switch is given or not
            for said in ([], [f"--use_{known.word}"]):
                with pytest.raises(MissingDependencyError, match=f"pip install {known.package}"):
                    parser.parse_args([*said, option["flags"][0], "1", "s.py"])
            return
    action = next((action for action in parser._actions if action.dest == option["dest"]), None)
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    if option["flags"][0].startswith("-"):
        assert {*option["flags"], *(flag.replace("_", "-") for flag in option["flags"])} <= known.keys()
        action = known[option["flags"][0]]
    assert action is not None
    assert action.dest == option["dest"]
    found = {"default": repr(action.default), "nargs": action.nargs}
    differing = [key for key, value in found.items() if str(value) != str(option[key])]
    if option["choices"] is not None and sorted(map(repr, action.choices or ())) != sorted(option["choices"]):
        differing.append("choices")
    listed = DIFFERENT.get(place)
    assert differing == ([] if listed is None else [listed.partition(":")[0]]), (found, option)
