"""One of each thing that people add to accel, as edits of the tree: what CONTRIBUTING.md counts files of."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Addition:
    """What adding one thing changes.

    Attributes:
        new: Files that are made, with their text.
        behind: For a file that is changed, (a line that stands there, what is put behind it), in order.
    """

    new: dict[str, str] = field(default_factory=dict)
    behind: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @property
    def files(self) -> int:
        """How many files are touched, tests and changelogs left out."""
        return len(self.new) + len(self.behind)

    def apply(self, tree: Path) -> None:
        """Change a copy of the tree.

        Raises:
            LookupError: A line that should stand in a file is not there, or not once.
        """
        for name, text in self.new.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, edits in self.behind.items():
            text = (tree / name).read_text()
            for anchor, added in edits:
                if text.count(f"{anchor}\n") != 1:
                    raise LookupError(f"{name} holds {anchor!r} {text.count(anchor)} times, not once")
                text = text.replace(f"{anchor}\n", f"{anchor}\n{added}\n")
            (tree / name).write_text(text)


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the sources and the documentation, and let the copies stand for the installed distributions.

    Entry points are read from the metadata that lies first on the path: that of the copied pyproject files.
    """
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    for package in (ROOT / "packages").iterdir():
        if (package / "src").is_dir():
            shutil.copytree(
                package / "src", folder / "packages" / package.name / "src", ignore=shutil.ignore_patterns("__pycache__")
            )
            for name in ("pyproject.toml", "README.md"):
                shutil.copy(package / name, folder / "packages" / package.name)
    return folder


_CORE = "packages/accel-core/src/accel_core"

DEVICE = Addition(
    behind={
        f"{_CORE}/options/hardware.py": [
            (
                'HARDWARE: tuple[Hardware, ...] = (',
                '    Hardware("meta", "Abacus", DistributedType.MULTI_ABACUS, "gloo", "ABACUS_VISIBLE_DEVICES"),',
            ),
        ],
        f"{_CORE}/options/enums.py": [
            ('    MULTI_NEURON = "MULTI_NEURON"', '    MULTI_ABACUS = "MULTI_ABACUS"'),
        ],
    },
)  # fmt: skip
"""A kind of hardware that torch drives by a name of its own. ("meta" stands in: torch has to know the name.)"""

STRATEGY = Addition(
    new={
        f"{_CORE}/strategies/echo.py": '''"""Data parallel that tells what it prepared."""

from accel_core.plugins.echo import EchoPlugin
from accel_core.strategies.ddp import DataParallelStrategy

__all__ = ["EchoStrategy"]


class EchoStrategy(DataParallelStrategy):
    """Data parallel that counts, `loudness` at a time, what it prepared."""

    name = "echo"
    plugin_type = EchoPlugin

    def distribute(self, model):
        """Count, then wrap."""
        self.heard = getattr(self, "heard", 0) + self.parts.plugin.loudness
        return super().distribute(model)
''',
        f"{_CORE}/plugins/echo.py": '''"""What a user configures of the strategy echo."""

from dataclasses import dataclass, field

from accel_core.options.echo import EchoOptions
from accel_core.options.option import option_named
from accel_core.plugins.handlers import KwargsHandler

__all__ = ["EchoPlugin"]


@dataclass
class EchoPlugin(KwargsHandler):
    """How loud it is."""

    loudness: int = field(default_factory=lambda: option_named(EchoOptions, "echo_loudness").read())
''',
        f"{_CORE}/options/echo.py": '''"""Options of the strategy echo."""

from accel_core.options.option import option, options

__all__ = ["EchoOptions"]


@options
class EchoOptions:
    """How loud it is."""

    echo_loudness: int = option("ECHO_LOUDNESS", int, 1, "How much each model counts.")
''',
    },
    behind={
        f"{_CORE}/strategies/registry.py": [
            (
                "ORDER: tuple[Row, ...] = (",
                '    Row("echo", "accel_core.strategies.echo:EchoStrategy", plugin="accel_core.plugins.echo:EchoPlugin",\n'
                '        flag="ACCELERATE_USE_ECHO", shown_as="echo_plugin"),',
            ),
        ],
    },
)
"""A built-in strategy with a plugin, which has one option."""
