"""The text of a configuration file as plain values, with the line of each key."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from accel_core.errors import ConfigurationError
from accel_launch.settings.reading import shortened

Lines: TypeAlias = dict[tuple[str, ...], int]
"""Line of every key, by the keys that lead to it."""


def parse(text: str, path: Path) -> tuple[dict[Hashable, Any], Lines]:
    """Read YAML or JSON that holds keys and values."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(error, path) from None
    if config is None:
        return {}, {}
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"A configuration file holds keys and values; {path} holds a {type(config).__name__}. Write KEY: VALUE "
            "lines."
        )
    lines: Lines = {}
    _note_lines(node, (), lines, path)
    return config, lines


def _unreadable(error: Exception, path: Path) -> ConfigurationError:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return ConfigurationError(
        f"The configuration file is neither YAML nor JSON; {path}{line}: {shortened(problem)}. Correct it, or write a "
        "new one with `accel config`."
    )


def _note_lines(node: yaml.Node | None, above: tuple[str, ...], lines: Lines, path: Path) -> None:
    """Note the line of each key, and refuse one with two values, of which YAML's reader would take the last."""
    said: dict[str, yaml.Node] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":  # which may be there for each of several aliases
            continue
        first = said.setdefault(key.value, value)
        if first is not value and yaml.serialize(first) != yaml.serialize(value):
            raise ConfigurationError(
                f"{path}:{key.start_mark.line + 1}: `{shortened(key.value)}` is said twice, differently; got another "
                f"value in line {first.start_mark.line + 1}. Remove one of them."
            )
        keys = (*above, key.value)
        lines[keys] = key.start_mark.line + 1
        _note_lines(value, keys, lines, path)
