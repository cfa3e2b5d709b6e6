"""One of each thing that people add to accel, as edits of the tree: what CONTRIBUTING.md counts files of."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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

    def files_outside(self, package: str) -> int:
        """Return how many files are touched outside of a package, tests and changelogs left out."""
        return len([name for name in {*self.new, *self.behind} if not name.startswith(f"{package}/")])

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

    Entry points are read from the metadata that lies first on the path: `entry_points` writes those of the copies.
    """
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    for package in (ROOT / "packages").iterdir():
        if (package / "src").is_dir():
            shutil.copytree(
                package / "src",
                folder / "packages" / package.name / "src",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            for name in ("pyproject.toml", "README.md"):
                shutil.copy(package / name, folder / "packages" / package.name)
    return folder


def entry_points(folder: Path) -> Path:
    """Write the metadata of the copies, as an installer makes it of their pyproject files; return where it lies."""
    site = folder / "site"
    for pyproject in (folder / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        metadata = site / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
        lines = []
        for group, points in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


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

PRECISION = Addition(
    new={
        f"{_CORE}/precision/abacus.py": '''"""Training on beads: linear layers that count."""

from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.precision.autocast import AutocastPrecision

__all__ = ["AbacusPrecision"]


class AbacusPrecision(AutocastPrecision):
    """Counts how many models were converted."""

    def __init__(self, device, autocast: AutocastKwargs) -> None:
        super().__init__("abacus", device, autocast, GradScalerKwargs())
        self.converted = 0

    def convert(self, model):
        self.converted += 1
        return model
''',
    },
    behind={
        f"{_CORE}/options/enums.py": [
            ('    """Number format in which the forward pass computes."""', '\n    ABACUS = "abacus"'),
            (
                '    "fp8": PrecisionRow("bfloat16", "fp8", exchanges_layers=True),',
                '    "abacus": PrecisionRow("bfloat16", "fp8", exchanges_layers=True),',
            ),
        ],
        f"{_CORE}/precision/registry.py": [
            (
                "from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler",
                "from accel_core.precision.abacus import AbacusPrecision",
            ),
            (
                "        return Precision(autocast=autocast)",
                '    if name == "abacus":\n        return AbacusPrecision(world.device, autocast)',
            ),
        ],
    },
)

_ECHO_ROW = (
    '    Engine("echo", "Echo", strategy="accel_core.strategies.echo:EchoStrategy", '
    'plugin="accel_core.plugins.echo:EchoPlugin", flag="ACCELERATE_USE_ECHO"),'
)

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

from accel_core._records import record
from accel_core.options.option import option, option_named
from accel_core.plugins.handlers import KwargsHandler

__all__ = ["EchoOptions", "EchoPlugin"]


@record(frozen=True)
class EchoOptions:
    """Options of the strategy."""

    option_prefix = "echo_"

    loudness: int = option(1, "How much each model counts.")


@dataclass
class EchoPlugin(KwargsHandler):
    """How loud it is."""

    loudness: int = field(default_factory=lambda: option_named(EchoOptions, "loudness").read())
''',
    },
    behind={
        f"{_CORE}/options/engines.py": [
            (
                "BUILT_IN: tuple[Engine, ...] = (",
                _ECHO_ROW,
            )
        ]
    },
)
"""A built-in strategy with a plugin, which has one option."""

OWN_PACKAGE = _OWN = "packages/accel-chorus"

ENGINE = Addition(
    new={
        f"{_OWN}/README.md": "# accel-chorus",
        f"{_OWN}/pyproject.toml": """[project]
name = "accel-chorus"

[project.entry-points."accel.engines"]
chorus = "accel_chorus.row:ENGINE"
""",
        f"{_OWN}/src/accel_chorus/__init__.py": "",
        f"{_OWN}/src/accel_chorus/row.py": """from accel_core.options.engines import Engine

ENGINE = Engine(
    "chorus",
    "Chorus",
    "torch",
    strategy="accel_chorus.strategy:ChorusStrategy",
    plugin="accel_chorus.plugin:ChorusPlugin",
    flag="ACCELERATE_USE_CHORUS",
    files=r"pytorch_model_chorus/voice_\\d+\\.pt",
    switch="use_chorus",
    options="accel_chorus.options:ChorusOptions",
    checks="accel_chorus.launching:check",
    environment="accel_chorus.launching:environment",
)
""",
        f"{_OWN}/src/accel_chorus/options.py": """from accel_core._records import record
from accel_core.options.option import Prompt, option


@record(frozen=True)
class ChorusOptions:
    chorus_voices: int = option(2, "How many voices sing.", prompt=Prompt("4"))
""",
        f"{_OWN}/src/accel_chorus/plugin.py": """from dataclasses import dataclass, field

from accel_chorus.options import ChorusOptions
from accel_core.options.option import option_named
from accel_core.plugins.handlers import KwargsHandler


@dataclass
class ChorusPlugin(KwargsHandler):
    voices: int = field(default_factory=lambda: option_named(ChorusOptions, "chorus_voices").read())
""",
        f"{_OWN}/src/accel_chorus/strategy.py": """from accel_chorus.plugin import ChorusPlugin
from accel_core.strategies.ddp import DataParallelStrategy


class ChorusStrategy(DataParallelStrategy):
    name = "chorus"
    plugin_type = ChorusPlugin
""",
        f"{_OWN}/src/accel_chorus/launching.py": """from accel_core.errors import ConfigurationError


def check(settings):
    if int(settings["chorus_voices"] or 2) > 8:
        raise ConfigurationError("A chorus has at most 8 voices; got more. Lower --chorus-voices.")


def environment(settings):
    return {"CHORUS_HALL": "large"}
""",
    },
)
"""An engine as a package of its own: an option, a check, a variable for the processes, files in checkpoints."""

TRACKER = Addition(
    new={
        "packages/accel-trackers/src/accel_trackers/lines.py": '''"""Lines of JSON in one file a run."""

import json
import pathlib

from accel_core.tracking.tracker import GeneralTracker, on_main_process

__all__ = ["LinesTracker"]


class LinesTracker(GeneralTracker):
    """Writes each call as a line of JSON."""

    name = "lines"
    requires_logging_directory = True
    libraries = ("json",)

    @on_main_process
    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.path = pathlib.Path(logging_dir, f"{run_name}.jsonl")

    @property
    def tracker(self):
        """The file."""
        return self.path

    @on_main_process
    def store_init_configuration(self, values):
        """Write the configuration."""
        self._write(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        """Write values."""
        self._write({"step": step, **values})

    def _write(self, values):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(values, default=str) + "\\n")
'''
    },
    behind={
        "packages/accel-trackers/src/accel_trackers/__init__.py": [
            ('    "DVCLiveTracker": "accel_trackers.dvclive",', '    "LinesTracker": "accel_trackers.lines",')
        ],
        "packages/accel-trackers/pyproject.toml": [
            ('[project.entry-points."accel.trackers"]', 'lines = "accel_trackers.lines:LinesTracker"')
        ],
        "packages/accel-trackers/README.md": [("| `dvclive` | DVCLive | `[dvclive]` |", "| `lines` | – | – |")],
    },
)
"""A tracker, which needs no library; one that needs one has its extra in the same pyproject.toml."""
