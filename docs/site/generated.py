"""Parts of pages that are made from the source: commands, variables, errors, configuration keys, examples.

None of it imports torch: the command line and the tables of options do not.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import diagrams
import reference
from mkdocs.structure.files import InclusionLevel

ROOT = Path(__file__).resolve().parents[2]

NOT_IN_NAV = InclusionLevel.NOT_IN_NAV

PROJECTS = [tomllib.loads(path.read_text())["project"] for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]

CONTRIBUTED: dict[str, str] = {
    name: place
    for project in PROJECTS
    for name, place in project.get("entry-points", {}).get("accel.commands", {}).items()
}
"""Commands that accel finds by entry point, which only an installed package has, each with its place."""


def make_importable() -> None:
    """Put the packages' sources first on the path."""
    sources = [str(folder) for folder in sorted((ROOT / "packages").glob("*/src"))]
    sys.path[:0] = [source for source in sources if source not in sys.path]


def commands() -> str:
    """Return a section for each command, made from its parser."""
    cli = import_module("accel_launch.cli")
    lines: list[str] = []
    for name in cli.BUILT_IN:
        module, _, attribute = CONTRIBUTED.get(name, "").partition(":")
        command = import_module(module) if module else cli.find_command(name)
        command = getattr(command, attribute) if attribute else command
        parser = cli.build_parser(command)
        lines += [f"## accel {name}", "", parser.description, ""]
        if name == "launch":
            lines += _synopsis(parser)
            lines += ["The flags are listed, with variables and configuration keys, under [Options](options.md).", ""]
        else:
            lines += _options(parser)
        for verb, sub in parser.subcommands().items():
            lines += [f"### accel {name} {verb}", "", sub.description or _help_of(parser, verb), "", *_options(sub)]
        if parser.epilog:
            lines += [_cell(parser.epilog), ""]
    return "\n".join(lines)


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    usage = parser.format_usage().removeprefix("Usage: ").strip()
    return ["```text", usage, "```", ""]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    formatter = parser._get_formatter()
    lines = _synopsis(parser)
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        shown = formatter._format_action_invocation(action) if action.option_strings else action.metavar or action.dest
        rows.append(f"| `{shown}` | {_cell(formatter._expand_help(action) if action.help else '')} |")
    return [*lines, "| argument | meaning |", "|---|---|", *rows, ""] if rows else lines


def _help_of(parser: argparse.ArgumentParser, verb: str) -> str:
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((str(choice.help) for choice in found._choices_actions if choice.dest == verb), "")


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]+)", r"`\1`", text)


def setting_variables() -> str:
    """Return the table of the variables that stand for a setting of `accel launch`."""
    settings = import_module("accel_launch.settings.table").ALL
    rows = sorted({(s.environment, s.words[0] if s.words else "", s.help) for s in settings if s.environment})
    return _table(
        ("variable", "flag", "meaning"),
        ((f"`{v}`", f"`{flag}`" if flag else "", _cell(text)) for v, flag, text in rows),
    )


def configuration_keys() -> str:
    """Return the table of the keys of a configuration file."""
    settings = import_module("accel_launch.settings.table").ALL
    rows = ((f"`{'.'.join(s.path)}`", f"`{s.words[0]}`" if s.words else "", _cell(s.help)) for s in settings if s.path)
    return _table(("key", "flag", "meaning"), sorted(rows))


def errors() -> str:
    """Return the table of the errors: class, builtin that it also is, when it is raised, what to do."""
    path = ROOT / "packages" / "accel-core" / "src" / "accel_core" / "errors.py"
    rows = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Error"):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        meaning, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
        remedy = rest.split("\n\n")[0] if not rest.startswith("Args:") else ""
        name = f"[`{node.name}`][accel_core.errors.{node.name}]"
        others = ", ".join(f"`{base}`" for base in bases if base not in ("AccelError", "Exception"))
        rows.append((name, _cell(meaning), _cell(remedy), others))
    return _table(("error", "raised for", "what to do", "is also"), rows)


def requirements() -> str:
    """Return the table of what each package needs, from its metadata."""
    rows = []
    for project in PROJECTS:
        needs = ", ".join(f"`{text}`" for text in project["dependencies"])
        extras = ", ".join(f"`[{name}]`" for name in project.get("optional-dependencies", {}))
        rows.append((project["name"], f"`{project['requires-python']}`", needs, extras))
    return _table(("package", "Python", "needs", "extras"), rows)


def packages_diagram() -> str:
    """Return the diagram of the packages, from their metadata."""
    ours = {project["name"] for project in PROJECTS}
    needs = {
        project["name"]: {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]} for project in PROJECTS
    }
    return _drawing(diagrams.packages({name: needs[name] & ours for name in sorted(needs)}))


def run_diagram() -> str:
    """Return the diagram of what happens in a run."""
    return _drawing(diagrams.from_text("run"))


def seam_diagram() -> str:
    """Return the diagram of what stands between a loop and the ways to train."""
    return _drawing(diagrams.from_text("seam"))


def checkpoint_diagram() -> str:
    """Return the diagram of what is on disk during a save, and what a crash leaves."""
    return _drawing(diagrams.from_text("checkpoint"))


def accumulation_diagram() -> str:
    """Return the diagram of the two loops of gradient accumulation."""
    return _drawing(diagrams.from_text("accumulation"))


def experts_diagram() -> str:
    """Return the diagram of which rank holds which experts."""
    return _drawing(diagrams.from_text("experts"))


def pipeline_diagram() -> str:
    """Return the diagram of which rank holds which blocks."""
    return _drawing(diagrams.from_text("pipeline"))


def parameters_diagram() -> str:
    """Return the picture of where weights, gradients and optimizer state live."""
    return _drawing(diagrams.parameters())


def memory_diagram() -> str:
    """Return the picture of what a training step holds, from moment to moment."""
    return _drawing(diagrams.memory())


def _drawing(svg: str) -> str:
    return f'<div class="accel-drawing">\n{svg}</div>\n'


def torch_features() -> str:
    """Return the table of what not every torch has: the version from which on it is there, and what to do before."""
    features = import_module("accel_core.host.versions").TORCH_FEATURES.values()
    return _table(
        ("feature", "from torch", "before"), ((each.name, each.since, f"refused; {each.instead}") for each in features)
    )


def abilities() -> str:
    """Return the table of what a model may have, or do, under which way to share parameters among ranks."""
    table = import_module("accel_parallel.sharding.supports")
    rows = ((name, *("yes" if able else "refused" for able in row)) for name, row in table.ABILITIES.items())
    return _table(("what a model has, or does", *table.ENGINES), rows)


def gallery() -> str:
    """Return a section for each example: what it says of itself, what it printed, its curve and its source."""
    lines = []
    for script in sorted((ROOT / "examples" / "gallery").glob("*.py")):
        results = ROOT / "docs" / "gallery" / script.stem
        source = script.read_text()
        if not results.with_suffix(".txt").exists():
            continue  # a module that the examples share
        text = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
        printed = results.with_suffix(".txt").read_text()
        lines += [f"## {printed.splitlines()[0]}", "", text[0], "", *text[2:], ""]
        lines += ["```{.text .result}", printed.rstrip(), "```", ""]
        lines += [f"![Curve of {script.stem}](gallery/{script.stem}.png)", ""]
        shown = textwrap.indent(f"```python\n{source}```", "    ")
        lines += [f'??? "examples/gallery/{script.name}"', "", shown, ""]
    return "\n".join(lines)


def flat_names() -> str:
    """Return the names of `accel`, a table for each task.

    Raises:
        LookupError: A part of the packages belongs to no task.
    """
    found, lines = reference.flat_names(), []
    for task, parts in TASKS.items():
        paths = [path for part in parts for path in sorted(found.pop(part))]
        rows = ((f"[`{path.rpartition('.')[2]}`][{path}]", reference.summary(path)) for path in paths)
        lines += [f"## {task}", "", _table(("name", "what it is"), rows)]
    if found:
        raise LookupError(f"Name the task of {sorted(found)} in TASKS of docs/site/generated.py.")
    return "\n".join(lines)


TASKS = {
    "Accelerator": ["accel_core.accelerator"],
    "Options for the Accelerator": [
        "accel_core.plugins",
        "accel_parallel.plugin",
        "accel_parallel.pipeline",
        "accel_deepspeed.plugin",
        "accel_megatron.plugin",
        "accel_core.options",
    ],
    "Processes and state": ["accel_core.state", "accel_core.random", "accel_core.logging", "accel_core.tqdm"],
    "Gather, reduce, broadcast": ["accel_core.comm"],
    "Load data": ["accel_core.data"],
    "Train": ["accel_core.optim", "accel_core.modules", "accel_core.precision"],
    "Memory": ["accel_core.devices"],
    "Save and resume": ["accel_core.checkpoint"],
    "Track experiments": ["accel_core.tracking"],
    "Start processes": ["accel_launch.notebook", "accel_launch.settings"],
    "Load and run large models": [
        "accel_bigmodel.dispatch",
        "accel_bigmodel.meta",
        "accel_bigmodel.checkpoint",
        "accel_bigmodel.device_map",
        "accel_bigmodel.memory",
        "accel_bigmodel.sizes",
        "accel_bigmodel.pipeline",
    ],
    "Plan": ["accel_plan.device_map", "accel_plan.headroom"],
    "Quantize": ["accel_quant.config", "accel_quant.load"],
    "Errors": ["accel_core.errors"],
    "Hooks and offloaded weights": ["accel_bigmodel.hooks", "accel_bigmodel.offload", "accel_bigmodel.placement"],
    "Environment": ["accel_core.host"],
}
"""The parts of the packages that `accel` exports names of, by what users do with them."""


def drop_in_modules() -> str:
    """Return the table of the drop-in's modules, with the names that each offers."""
    rows = ((f"`{module}`", ", ".join(f"`{name}`" for name in names)) for module, names in reference.drop_in())
    return _table(("module", "names"), rows)


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
