"""Prints docs/reference/options.md, made from the rows of the settings.

Run it from the root of the repository after a row has changed:

    python packages/accel-launch/tests/reference.py > docs/reference/options.md
"""

import sys
from collections.abc import Iterator

from accel_core.options.option import boolean
from accel_launch.settings.model import Setting
from accel_launch.settings.table import ALL

HEAD = """# Options

<!-- Written by packages/accel-launch/tests/reference.py. -->

Every option of `accel launch`. Give it as a flag, an environment variable or a key of the configuration file; a flag
overrides a variable, and a variable overrides the file ([Launch a run](../guides/launching.md)). A default in
parentheses is the training process's own, which applies if the launcher passes nothing.
"""


def lines() -> Iterator[str]:
    """Return the lines of the page."""
    yield HEAD
    topic = ""
    for setting in ALL:
        if setting.topic != topic:
            topic = setting.topic
            yield f"\n## {topic}\n"
            yield "| flag | meaning | values | default | environment | file |"
            yield "|---|---|---|---|---|---|"
        yield row(setting)


def row(setting: Setting) -> str:
    """Return the line of one setting."""
    flags = " ".join(f"`{word}`" for word in setting.words)
    cells = [flags, help_of(setting), values(setting), default(setting)]
    cells += [code(setting.environment), code(".".join(setting.path))]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def help_of(setting: Setting) -> str:
    """Return the help of a setting, and when the processes get it."""
    option = setting.option
    if option is None or not option.only_with:
        return setting.help
    return f"{setting.help} Only with `--{option.only_with.replace('_', '-')}` above 1."


def values(setting: Setting) -> str:
    """Return the values that it takes."""
    if setting.kind in ("switch", "off-switch"):
        return "switch"
    if setting.choices:
        return ", ".join(code(str(choice)) for choice in setting.offered)
    return {int: "whole number", float: "number"}.get(setting.parse, "yes or no" if _is_boolean(setting) else "text")  # type: ignore[call-overload, no-any-return]


def _is_boolean(setting: Setting) -> bool:
    return setting.yes_or_no or (setting.option is not None and setting.option.parser is boolean)


def default(setting: Setting) -> str:
    """Return its default."""
    if setting.kind in ("switch", "off-switch"):
        return ""
    if setting.default not in (None, ""):
        return code(str(setting.default))
    option = setting.option
    return "" if option is None or option.default is None else f"({code(str(option.default))})"


def code(text: str) -> str:
    """Return a text in the font of code."""
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
