"""Which module needs which, counting those that are named in strings and imported when they are first used.

import-linter reads import statements alone: a circle closed by `import_module("accel_launch.cli")` would be none to it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Edges = dict[str, dict[str, int]]
_ANNOUNCING = ("Engine", "attach_moved")
"""Calls that say where an engine has something."""


def modules() -> dict[str, Path]:
    """Return every module of every package but the drop-in, whose paths are the original's."""
    found = {}
    for package in sorted((ROOT / "packages").glob("*/src/*")):
        if package.name != "accelerate":
            for path in sorted(package.rglob("*.py")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges(known: dict[str, Path]) -> Edges:
    """Return, for each module, the modules that it names, each with the line.

    What a row of an engine announces is found as an entry point is, and does not count.
    """
    found: Edges = defaultdict(dict)
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        rows = [tree] if name.endswith(".row") else [node for node in calls if node.func.id in _ANNOUNCING]  # type: ignore[attr-defined]
        announced = {inner for row in rows for inner in ast.walk(row) if isinstance(inner, ast.Constant)}
        for node in ast.walk(tree):
            for target in [] if node in announced else _targets(node, known):
                if target != name and not name.startswith(f"{target}."):
                    found[name].setdefault(target, node.lineno)  # type: ignore[attr-defined]
    return found


def _targets(node: ast.AST, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if isinstance(node, ast.ImportFrom):
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name for name in inner if name in known] or [name for name in [node.module or ""] if name in known]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        match = re.fullmatch(r"(accel_\w+(?:\.\w+)+)(?::\w+)?", node.value)
        return [match[1]] if match and match[1] in known else []
    return []


def circles(found: Edges) -> list[list[str]]:
    """Return the sets of files or folders, children of one folder, that need one another in a circle."""
    levels: dict[str, Edges] = defaultdict(lambda: defaultdict(dict))
    for source, targets in found.items():
        for target, line in targets.items():
            one, two = source.split("."), target.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if shared:
                parent = ".".join(one[:shared])
                levels[parent][f"{parent}.{one[shared]}"].setdefault(f"{parent}.{two[shared]}", line)
    return [circle for level in levels.values() for circle in _components(level) if len(circle) > 1]


def _components(level: Edges) -> list[list[str]]:
    """Return the strongly connected components, by Kosaraju's two walks."""
    order: list[str] = []
    seen: set[str] = set()
    nodes = sorted({*level, *(target for targets in level.values() for target in targets)})
    backward: dict[str, list[str]] = defaultdict(list)
    for source, targets in level.items():
        for target in targets:
            backward[target].append(source)

    def leave_last(node: str) -> None:
        seen.add(node)
        for target in level.get(node, {}):
            if target not in seen:
                leave_last(target)
        order.append(node)

    for node in nodes:
        if node not in seen:
            leave_last(node)
    components: list[list[str]] = []
    taken: set[str] = set()
    for node in reversed(order):
        pending, component = [node], []
        while pending:
            one = pending.pop()
            if one not in taken:
                taken.add(one)
                component.append(one)
                pending += backward[one]
        if component:
            components.append(sorted(component))
    return components
