"""The text of a configuration file as plain values, with the line of each key."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from accel_core.errors import ConfigurationError
from accel_launch.settings.reading import shortened

__all__ = ["Lines", "parse"]

Lines: TypeAlias = dict[tuple[str, ...], int]
"""Line of every key, by the keys that lead to it."""

_LONGEST_NUMBER = 64


class _Loader(yaml.SafeLoader):
    """Plain values only: no dates, bytes or sets, no endless numbers, no text that cannot be passed to a process."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:timestamp"]
        for letter, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def number(self, node: yaml.ScalarNode) -> object:
        """Return a number or truth value; a number with too many digits stays text."""
        if len(node.value) > _LONGEST_NUMBER:  # converting it would take quadratic time
            return str(node.value)
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, KeyError, IndexError):  # a tag such as !!int on a text that is not a number
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"got {shortened(node.value)!r} where the tag asks for {kind}", problem_mark=node.start_mark
            ) from None

    def text(self, node: yaml.ScalarNode) -> str:
        """Return a text that an environment variable can hold."""
        found = str(self.construct_yaml_str(node))
        if "\0" in found or any("\ud800" <= letter <= "\udfff" for letter in found):  # execve and UTF-8 refuse them
            raise yaml.constructor.ConstructorError(
                problem="got text that cannot be passed to a process", problem_mark=node.start_mark
            )
        return found


for _kind in ("bool", "int", "float"):
    _Loader.yaml_constructors[f"tag:yaml.org,2002:{_kind}"] = _Loader.number
_Loader.yaml_constructors["tag:yaml.org,2002:str"] = _Loader.text


def parse(text: str, path: Path) -> tuple[dict[Hashable, Any], Lines]:
    """Read YAML or JSON that holds keys and values."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _refuse_repeated(node, path)
        config = {} if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:  # the latter of a value that contains itself, too
        raise _unreadable(error, path) from None
    if config is None:
        return {}, {}
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"A configuration file holds keys and values; {path} holds a {type(config).__name__}. Write KEY: VALUE "
            "lines."
        )
    lines: Lines = {}
    if node is not None:
        _note_lines(node, (), lines)
    return config, lines


def _unreadable(error: Exception, path: Path) -> ConfigurationError:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is nested too deep"
    return ConfigurationError(
        f"The configuration file is neither YAML nor JSON; {path}{line}: {shortened(problem)}. Correct it, or write a "
        "new one with `accel config`."
    )


def _refuse_repeated(node: yaml.Node, path: Path) -> None:
    """Refuse a key that says one thing here and another thing there; YAML's reader would take the last."""
    said: dict[str, yaml.Node] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        _refuse_repeated(value, path)
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":  # which may be there for each of several aliases
            continue
        first = said.setdefault(key.value, value)
        if first is not value and yaml.serialize(first) != yaml.serialize(value):
            line, before = key.start_mark.line + 1, first.start_mark.line + 1
            raise ConfigurationError(
                f"{path}:{line}: `{shortened(key.value)}` is said twice, differently; got another value in line "
                f"{before}. Remove one of them."
            )


def _note_lines(node: yaml.Node, above: tuple[str, ...], lines: Lines) -> None:
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            keys = (*above, str(key.value))
            lines[keys] = key.start_mark.line + 1
            if isinstance(value, yaml.MappingNode):
                _note_lines(value, keys, lines)
